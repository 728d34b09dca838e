"""One rank's part of a model on meta whose layers or experts are divided over neighboring ranks.

Parameters have the shapes of this rank's part, and modules compute what a rank computes alone: instead of running a
collective, they create a tensor of the size that it would return. The model thus runs on fake tensors without other
ranks, and keeps what a real one keeps. If a size is not divisible, the part is that of the first rank, the largest.
Tokens are assumed to be sent to a rank's experts almost evenly: a sixteenth more than the even share.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.models import keep_experts, parallel_plan, tied_names
from fsdp_shard.sharding import (
    COLUMN_STYLES,
    EMBEDDING_STYLE,
    GATHERED_STYLES,
    SENDS_TO_EXPERTS,
    ShardConfig,
    Unit,
)
from fsdp_shard.utils import fake_all_reduce, fake_all_to_all

_BY_ROWS = (*COLUMN_STYLES, EMBEDDING_STYLE)
_UNEVEN = 16  # a rank's experts are assumed to receive one more token per this many


def divide_model(model: PreTrainedModel, shard: ShardConfig) -> frozenset[str]:
    """Divide `model` according to `shard`; return the FQNs of the modules that hold experts."""
    if shard.tensor_parallel > 1:
        _divide_layers(model, shard.tensor_parallel)
    if shard.expert_parallel > 1:
        return _divide_experts(model, shard.expert_parallel)
    return frozenset()


def with_expert_units(units: Sequence[Unit], experts: frozenset[str]) -> list[Unit]:
    """The units, with each unit's experts as a separate unit before it."""
    found = []
    for unit in units:
        for fqn in sorted(experts):
            inside = tuple(name for name in unit.parameters if name.startswith(f"{fqn}."))
            if inside:
                found.append(replace(unit, fqn=fqn, parameters=inside))
        own = tuple(name for name in unit.parameters if name.rpartition(".")[0] not in experts)
        found.append(replace(unit, parameters=own))
    return found


def _divide_layers(model: PreTrainedModel, num_ranks: int) -> None:
    ties = tied_names(model)
    plan = {name: style for name, style in parallel_plan(model, "tp_plan").items() if name not in ties}
    params = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, param in params.items():
        style = plan.get(ties.get(name, name))
        if style is None or (name.endswith(".bias") and style not in _BY_ROWS):
            continue
        if id(param) not in made:
            dim = max(0, param.ndim - 2) if style in _BY_ROWS else param.ndim - 1
            part = param.detach().chunk(num_ranks, dim)[0].contiguous()
            made[id(param)] = nn.Parameter(part, requires_grad=param.requires_grad)
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, last, made[id(param)])
        if isinstance(module, nn.Embedding) and (module.padding_idx or 0) >= len(module.weight):
            module.padding_idx = None  # another rank has the row of the padding token
    for fqn, style in plan.items():
        if fqn not in params:
            _communicate(model.get_submodule(fqn), style, num_ranks)


def divided_by_columns(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights of a divided model of which each rank has some columns."""
    params, plan = dict(model.named_parameters()), parallel_plan(model, "tp_plan")
    chosen = [params[name] for name, style in plan.items() if name in params and style not in _BY_ROWS]
    return [param for param in chosen if param.ndim > 1]


def _communicate(module: nn.Module, style: str, num_ranks: int) -> None:
    """Make a divided layer create the tensors that its collectives would return."""
    if style in COLUMN_STYLES:
        module.register_forward_pre_hook(lambda module, args: (_SummedBackward.apply(args[0]), *args[1:]))  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        module.register_forward_hook(lambda module, args, output: _Summed.apply(output))  # type: ignore[no-untyped-call]  # untyped in torch
    if style in GATHERED_STYLES:
        module.register_forward_hook(lambda module, args, output: _Gathered.apply(output, num_ranks))  # type: ignore[no-untyped-call]  # untyped in torch


class _Summed(torch.autograd.Function):
    """An all-reduce in the forward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return fake_all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class _SummedBackward(torch.autograd.Function):
    """An all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].clone()


class _Gathered(torch.autograd.Function):
    """An all-gather of the last dimension in the forward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
        ctx.num_ranks = num_ranks
        parts = tensor.new_empty((num_ranks, *tensor.shape))
        return torch.cat(list(parts), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].chunk(ctx.num_ranks, -1)[0].contiguous(), None


def _divide_experts(model: PreTrainedModel, num_ranks: int) -> frozenset[str]:
    plan = parallel_plan(model, "ep_plan")
    experts = frozenset(fqn for fqn, style in plan.items() if style == SENDS_TO_EXPERTS)
    for fqn in experts:
        module: Any = model.get_submodule(fqn)
        for name, param in list(module.named_parameters(recurse=False)):
            part = param.detach()[: len(param) // num_ranks].contiguous()
            setattr(module, name, nn.Parameter(part, requires_grad=param.requires_grad))
        keep_experts(module, module.num_experts // num_ranks)
        module.forward = _Dispatch(module.forward)
    return experts


class _Dispatch:
    """The `forward` of experts that sends tokens to their experts and back, as transformers' `AllToAllEP` does."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        num_top_k = top_k_index.size(-1)
        order = torch.argsort(top_k_index.reshape(-1))
        num_received = len(order) + -(-len(order) // _UNEVEN)
        received = _Exchanged.apply(hidden_states[order // num_top_k], num_received)  # type: ignore[no-untyped-call]  # untyped in torch
        ids = torch.zeros((num_received, 1), dtype=torch.long, device=hidden_states.device)
        output = self._forward(received, ids, torch.ones_like(ids, dtype=received.dtype))
        back = _Exchanged.apply(output, len(order))  # type: ignore[no-untyped-call]  # untyped in torch
        tokens = torch.empty_like(back)
        tokens[order] = back
        tokens = tokens.view(*top_k_weights.shape, hidden_states.size(-1))
        return (tokens * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


class _Exchanged(torch.autograd.Function):
    """An all-to-all in both passes, after which a rank has `num_rows` rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.num_rows = len(tensor)
        return fake_all_to_all(tensor, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].new_empty((ctx.num_rows, *gradients[0].shape[1:])), None
