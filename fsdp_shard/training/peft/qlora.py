"""The frozen part of a model under an adapter, held in fewer bits (QLoRA): which layers, and what fills them.

Plain frozen linear layers of the repeated blocks are quantized; embeddings, norms and the output head, which lose most
by it, stay as they are. Knows no file: what is read into the layers is told by the names of stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import no_split_blocks, tied_names

if TYPE_CHECKING:
    from fsdp_shard.models import Code
    from fsdp_shard.sharding import ShardConfig


@dataclass(frozen=True)
class QuantizedBase:
    """`names` maps the parameter of a quantized weight to the stored tensor that fills it; `num_weights` are in all."""

    code: Code
    names: Mapping[str, str]
    num_weights: int

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.num_weights / 1e6:,.2f} M of it in {len(self.names)} matrices as {self.code.name}, "
            f"{self.code.bits} bits a weight"
        )


def quantize_base(
    model: nn.Module, kind: str, shard: ShardConfig, names: Mapping[str, str]
) -> tuple[QuantizedBase | None, dict[str, str]]:
    """Hold the frozen linear layers of `model` (on meta, with its adapter) as `kind`, in place.

    `names` says which stored tensor fills each parameter; returned is the same for those that stay as they were. None
    and all of them for `none`. Raises ConfigError where `shard` or the model does not allow it.
    """
    import torch

    from fsdp_shard.models import CODES, QuantizedLinear

    left = dict(names)
    if kind == "none":
        return None, left
    _refuse(kind, shard)
    found, num_weights = {}, 0
    for fqn in list(_frozen_linears(model, shard.blocks)):
        linear = model.get_submodule(fqn)
        assert isinstance(linear, nn.Linear)
        held_as, dtype = getattr(torch, shard.held_bytes), getattr(torch, shard.param_dtype)
        model.set_submodule(fqn, QuantizedLinear(linear, CODES[kind], held_as, dtype))
        num_weights += linear.weight.numel()
        if (stored := left.pop(f"{fqn}.weight", None)) is not None:
            found[f"{fqn}.quantized.rows"] = stored
    if not num_weights:
        raise ConfigError(
            f"adapter.quantize={kind} would do nothing: the blocks of {type(model).__name__} have no plain linear "
            f"layer (torch.nn.Linear) that is frozen. Give adapter.quantize=none."
        )
    return QuantizedBase(CODES[kind], found, num_weights), left


def _frozen_linears(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """FQNs of the linear layers that are multiplied with and not trained; a layer that is trained whole as a copy of
    itself (peft's `original_module`) is not."""
    ties = tied_names(model)
    shared = {*ties, *ties.values()}
    for block in no_split_blocks(model, blocks):
        if not block.repeated:
            continue
        for name, module in model.get_submodule(block.fqn).named_modules():
            fqn = f"{block.fqn}.{name}" if name else block.fqn
            if type(module) is not nn.Linear or module.weight.requires_grad or f"{fqn}.weight" in shared:
                continue
            if ".original_module" not in fqn:
                yield fqn


def _refuse(kind: str, shard: ShardConfig) -> None:
    if shard.tensor_parallel > 1:
        raise ConfigError(
            f"adapter.quantize={kind} does not go together with shard.tensor_parallel={shard.tensor_parallel}: 64 "
            f"neighbors that share a scale would be divided by columns. Give shard.tensor_parallel=1."
        )
    if shard.compile and shard.held_bytes != "uint8":
        raise ConfigError(
            f"adapter.quantize={kind} does not go together with shard.compile={str(shard.compile).lower()} under "
            f"shard=fsdp1, which gathers each quantized weight on its own inside a block; use shard=fsdp2."
        )
