"""Bytes that the forward pass of one micro-batch keeps for the backward pass, measured without computing anything.

The model runs on fake tensors, which have shapes, dtypes and storages but no memory (FakeTensorMode), under autograd's
hooks for saved tensors; each storage counts once, parameters do not. What recomputed blocks do not keep is told from
which block saved it, and what selective recomputation keeps from the operator that made it. Kernels are those of the
CPU, which for attention keep what a GPU's flash attention keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_shard.models import Block
from fsdp_shard.sharding import keeps_results

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
    """Storages by their address (kept, so that none is used twice) with the block that saved them.

    Of `recomputed` blocks their `inputs` too, and `results`: what selective recomputation keeps.
    """

    skipped: set[int]
    recomputed: Collection[str]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    maker: dict[int, str | None] = field(default_factory=dict)
    inputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    results: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    block: str | None = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.skipped and key not in self.storages:
            self.storages[key], self.maker[key] = storage, self.block
        return tensor

    def enter(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = fqn
        if fqn in self.recomputed:
            self.inputs |= {
                value.untyped_storage()._cdata: value.untyped_storage() for value in _tensors((args, kwargs))
            }

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.block = None

    def made(self, output: Any) -> None:
        """Note what an operator that selective recomputation keeps has made."""
        if self.block in self.recomputed:
            self.results |= {value.untyped_storage()._cdata: value.untyped_storage() for value in _tensors(output)}

    def device_bytes(self, offload: bool) -> int:
        """What is kept on the device while one block runs backward, which has all that it needs there.

        With `offload`, what blocks save (inputs of recomputed ones too, but not results) is elsewhere until then.
        """
        kept, of_block = dict(self.results), dict[str, int]()
        if not offload:
            kept |= self.inputs
        for key, storage in self.storages.items():
            maker = self.maker[key]
            if maker is None or not (offload or maker in self.recomputed):
                kept[key] = storage
            elif key not in kept:
                of_block[maker] = of_block.get(maker, 0) + storage.nbytes()
        return sum(storage.nbytes() for storage in kept.values()) + max(of_block.values(), default=0)


class _Results(TorchDispatchMode):
    """Tells `saved` what each operator makes whose results selective recomputation keeps."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if keeps_results(func):
            self._saved.made(output)
        return output


def measure_activations(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    batch_size: int,
    sequence_length: int,
    *,
    recomputed: Collection[str] = (),
    selective: bool = False,
    offload: bool = False,
) -> Activations:
    """Run `model` (on meta, in the dtype that it computes in) on `batch_size` windows of `sequence_length` tokens.

    Blocks that are `recomputed` (FQNs) keep their inputs only, if `selective` their dear results too; with `offload`
    what blocks keep is not on the device. `model` is changed: it ends with fake parameters.
    """
    model.train()
    with _causal_without_mask(model), FakeTensorMode():
        _replace(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        params = {param.untyped_storage()._cdata for param in model.parameters()}
        saved = _Saved(params | {buffer.untyped_storage()._cdata for buffer in model.buffers()}, recomputed)
        for block in blocks:
            if block.repeated:
                module = model.get_submodule(block.fqn)
                module.register_forward_pre_hook(partial(saved.enter, block.fqn), with_kwargs=True)
                module.register_forward_hook(saved.leave)
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor),
            _Results(saved) if selective else nullcontext(),
        ):
            output = model(**_inputs(model, batch_size, sequence_length), use_cache=False)
        logits = output.logits.untyped_storage().nbytes()
        return Activations(saved.device_bytes(offload), logits)


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
