"""Quantizes the frozen layers under an adapter (QLoRA).

The frozen linear layers of the repeated blocks are quantized. Embeddings, norms and the output head, which would lose
most precision, are not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import QUANTIZATION_CODES, QuantizationCode, QuantizedLinear, no_split_blocks, tied_names
from fsdp_shard.sharding import ShardConfig


@dataclass(frozen=True)
class QuantizedBase:
    """The quantized weights of a model.

    Attributes:
        code: The quantization scheme.
        names: Parameter of a quantized weight -> stored tensor that fills it.
        num_weights: Number of quantized weights.
    """

    code: QuantizationCode
    names: Mapping[str, str]
    num_weights: int

    def describe(self) -> str:
        """Describe how much is quantized."""
        return (
            f"{self.num_weights / 1e6:,.2f} M of it in {len(self.names)} matrices as {self.code.name}, "
            f"{self.code.bits} bits per weight"
        )


def quantize_base(
    model: nn.Module, kind: str, shard: ShardConfig, names: Mapping[str, str]
) -> tuple[QuantizedBase | None, dict[str, str]]:
    """Quantize the frozen linear layers of a model in place.

    Args:
        model: The model, on the meta device, with its adapter.
        kind: The setting `adapter.quantize`.
        shard: Settings of the wrapper.
        names: Parameter -> stored tensor that fills it.

    Returns:
        The quantized weights, or None for `none`; and `names` without the quantized weights.

    Raises:
        ConfigError: The wrapper or the model does not support quantization.
    """
    left = dict(names)
    if kind == "none":
        return None, left
    _check_shard(kind, shard)
    found, num_weights = {}, 0
    for fqn, linear in list(_frozen_linears(model, shard.blocks)):
        held_as, dtype = getattr(torch, shard.quantized_dtype), getattr(torch, shard.param_dtype)
        model.set_submodule(fqn, QuantizedLinear(linear, QUANTIZATION_CODES[kind], held_as, dtype))
        num_weights += linear.weight.numel()
        if (stored := left.pop(f"{fqn}.weight", None)) is not None:
            found[f"{fqn}.quantized.rows"] = stored
    if not num_weights:
        raise ConfigError(
            f"adapter.quantize={kind} has no effect: the blocks of {type(model).__name__} have no plain linear "
            f"layer (torch.nn.Linear) that is frozen. Set adapter.quantize=none."
        )
    return QuantizedBase(QUANTIZATION_CODES[kind], found, num_weights), left


def _frozen_linears(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield FQN and module of the frozen linear layers in use, not of peft's `original_module` of a trained copy."""
    ties = tied_names(model)
    tied = {*ties, *ties.values()}
    for layer in [block.fqn for block in no_split_blocks(model, blocks) if block.repeated]:
        for fqn, module in model.get_submodule(layer).named_modules(prefix=layer):
            if type(module) is not nn.Linear or module.weight.requires_grad or f"{fqn}.weight" in tied:
                continue
            if ".original_module" not in fqn:
                yield fqn, module


def _check_shard(kind: str, shard: ShardConfig) -> None:
    if shard.tensor_parallel > 1:
        raise ConfigError(
            f"adapter.quantize={kind} cannot be combined with shard.tensor_parallel={shard.tensor_parallel}, which "
            f"could divide the 64 weights of a scale. Set shard.tensor_parallel=1."
        )
    if shard.compile and shard.quantized_dtype != "uint8":
        raise ConfigError(
            f"adapter.quantize={kind} cannot be combined with shard.compile={str(shard.compile).lower()} under "
            f"shard={shard.wrapper}, which gathers each quantized weight on its own inside a block; use shard=fsdp2 "
            f"with torch 2.13 or newer."
        )
