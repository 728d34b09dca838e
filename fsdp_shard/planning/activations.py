"""Bytes that the forward pass of one micro-batch keeps for the backward pass, measured without computing anything.

The model runs on fake tensors, which have shapes, dtypes and storages but no memory (FakeTensorMode), under autograd's
hooks for saved tensors; each storage counts once, parameters do not. Kernels are those of the CPU, which for attention
keep what a GPU's flash attention keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_shard.blocks import Block

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers builds a causal mask whenever it meets fake tensors; real training without padding has none, so that
# kernels with a causal flag are used. This attention is sdpa without a mask.
_ATTENTION = "fsdp_shard_plan"


@dataclass(frozen=True)
class Activations:
    """`saved_bytes`: kept until the backward pass has used them; `logits_bytes`: the model's output."""

    saved_bytes: int
    logits_bytes: int


@dataclass
class _Saved:
    """Storages by their address (kept, so that none is used twice), in total and for each block that made them."""

    skipped: set[int]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    maker: dict[int, str | None] = field(default_factory=dict)
    inputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    block: str | None = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.skipped and key not in self.storages:
            self.storages[key], self.maker[key] = storage, self.block
        return tensor

    def enter(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = fqn
        for value in _tensors((args, kwargs)):
            storage = value.untyped_storage()
            self.inputs[storage._cdata] = storage

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.block = None

    def total_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    def recomputed_bytes(self) -> int:
        """What is kept when each block keeps its inputs only, and one at a time is computed again."""
        kept = dict(self.inputs)
        inside: dict[str, int] = {}
        for key, storage in self.storages.items():
            maker = self.maker[key]
            if maker is None:
                kept[key] = storage
            elif key not in self.inputs:
                inside[maker] = inside.get(maker, 0) + storage.nbytes()
        return sum(storage.nbytes() for storage in kept.values()) + max(inside.values(), default=0)


def measure_activations(
    model: PreTrainedModel, blocks: Sequence[Block], batch_size: int, sequence_length: int, *, checkpointing: bool
) -> Activations:
    """Run `model` (on meta, in the dtype that it computes in) on `batch_size` windows of `sequence_length` tokens.

    With `checkpointing`, repeated blocks keep only their inputs. `model` is changed: it ends with fake parameters.
    """
    model.train()
    with _causal_without_mask(model), FakeTensorMode():
        _replace(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        params = {param.untyped_storage()._cdata for param in model.parameters()}
        saved = _Saved(params | {buffer.untyped_storage()._cdata for buffer in model.buffers()})
        for block in blocks:
            if block.repeated:
                module = model.get_submodule(block.fqn)
                module.register_forward_pre_hook(partial(saved.enter, block.fqn), with_kwargs=True)
                module.register_forward_hook(saved.leave)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            output = model(**_inputs(model, batch_size, sequence_length), use_cache=False)
        logits = output.logits.untyped_storage().nbytes()
        return Activations(saved.recomputed_bytes() if checkpointing else saved.total_bytes(), logits)


def _inputs(model: PreTrainedModel, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    names = ["input_ids"]
    if getattr(model.config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return {name: torch.zeros((batch_size, sequence_length), dtype=torch.long) for name in names}


def _replace(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give every parameter and buffer of `model` what `make` makes of it; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(make(param), requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = make(buffer)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextmanager
def _causal_without_mask(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that attends through sdpa do so by the causal flag alone."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if model.config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
