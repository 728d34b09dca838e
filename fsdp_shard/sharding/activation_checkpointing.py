"""What blocks keep for the backward pass: all, nothing but their inputs, or what is dear to compute again.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). *Selective* keeps the results of matrix products and
of attention, which take nearly all of the time, and computes the cheap rest again. *Offload* keeps what is kept in CPU
memory. Knows blocks and no wrapper.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_shard.models import no_split_blocks

if TYPE_CHECKING:
    from fsdp_shard.sharding.config import ShardConfig

# The wrappers' own levels in parameter names, which no checkpoint may show.
_WRAPPER_LEVELS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")

_KEPT_NAMES = (
    "mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def recompute_blocks(model: nn.Module, shard: ShardConfig) -> list[nn.Module]:
    """Replace the repeated blocks of `model` that `shard` names by ones that keep less; returns all repeated blocks."""
    names = [block.fqn for block in no_split_blocks(model, shard.blocks) if block.repeated]
    recomputed = set(recomputed_fqns(names, shard.activation_checkpointing))
    contexts = _selective if shard.activation_checkpointing == "selective" else None
    for fqn in names:
        module = model.get_submodule(fqn)
        if fqn in recomputed:
            settings = {} if contexts is None else {"context_fn": contexts}
            module = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **settings)
        if shard.activation_offload:
            module = OffloadWrapper(module)  # type: ignore[no-untyped-call]  # torch's base class is untyped
        model.set_submodule(fqn, module)
    return [model.get_submodule(fqn) for fqn in names]


def recomputed_fqns(blocks: Sequence[str], kind: bool | int | str) -> list[str]:
    """Those of `blocks` that are computed again in the backward pass, by `shard.activation_checkpointing`."""
    if kind in ("none", "all", "selective") or isinstance(kind, bool):
        return list(blocks) if kind in (True, "all", "selective") else []
    assert isinstance(kind, int)
    return list(blocks[kind - 1 :: kind])


def keeps_results(operator: Any) -> bool:
    """Whether selective checkpointing keeps what `operator` computes: matrix products and attention."""
    return operator in _kept_operators()


def clean_fqn(name: str) -> str:
    """`name` as the unwrapped model has it."""
    for level in _WRAPPER_LEVELS:
        name = name.replace(level, "")
    return name


class OffloadWrapper(ActivationWrapper):
    """A block whose saved tensors are in CPU memory between its forward and its backward pass.

    torch's own copies parameters too, which stay where they are, gathered or not.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with offloaded():
            return self._checkpoint_wrapped_module(*args, **kwargs)


def offloaded() -> AbstractContextManager[None]:
    """Copy what autograd saves inside to CPU memory, and back when it is used; all but parameters and views of them."""
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host)


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return tensor.device, tensor
    # With the strides that it has: compiled backward passes were made for them.
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.preserve_format)
    return tensor.device, pinned.copy_(tensor)


def _from_host(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps_results(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept_operators() -> set[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in _KEPT_NAMES)
    return {packet.default for packet in packets if packet is not None}
