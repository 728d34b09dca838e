"""Weights of linear layers in 8 or 4 bits, by torchao, as soon as they are loaded.

Those of the repeated blocks are quantized, and in 8 bits an output head that is no embedding too. What a layer cannot
take (4 bits want a width that 32 divides) stays as it is, and is counted so. Only this imports torchao.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from fsdp_shard.models import Block

_GROUP = 32  # weights that share a scale in 4 bits


@dataclass(frozen=True)
class Quantizer:
    """What is quantized, by the FQN of its block, and how: `encode` takes a layer whose weight is there."""

    layers: Mapping[str, Sequence[nn.Linear]]
    encode: Callable[[nn.Linear], None]


def check_quantize(kind: str, setting: str) -> None:
    """Raise ConfigError when torchao, which `kind` needs, is not installed."""
    if kind != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{setting}={kind} needs torchao, which is not installed: pip install 'fsdp-shard[quantize]'."
        )


def quantized_layers(model: PreTrainedModel, blocks: Sequence[Block], kind: str) -> dict[str, list[nn.Linear]]:
    """The linear layers to quantize, by the FQN of their block."""
    head = model.get_output_embeddings() if kind == "int8" else None
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    found: dict[str, list[nn.Linear]] = {}
    for block in blocks if kind != "none" else ():
        module = model.get_submodule(block.fqn)
        inside = [module] if block.direct else list(module.modules())
        layers: list[Any] = [layer for layer in inside if block.repeated or layer is head]
        found[block.fqn] = [layer for layer in layers if _takes(layer, kind) and uses[id(layer.weight)] == 1]
    return found


def quantized_blocks(model: PreTrainedModel, blocks: Sequence[Block], kind: str) -> list[Block]:
    """`blocks` with the bytes that they will have."""
    layers = quantized_layers(model, blocks, kind)
    saved = {fqn: sum(layer.weight.nbytes - _bytes(layer, kind) for layer in its) for fqn, its in layers.items()}
    return [replace(block, num_bytes=block.num_bytes - saved.get(block.fqn, 0)) for block in blocks]


def make_quantizer(model: PreTrainedModel, blocks: Sequence[Block], kind: str, device_type: str) -> Quantizer | None:
    """What quantizes the layers of `blocks`; None for `none`."""
    if kind == "none":
        return None
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    settings: Any
    if kind == "int8":
        settings = Int8WeightOnlyConfig(set_inductor_config=False)
    elif device_type == "cuda":
        settings = Int4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False)
    else:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        settings = PrototypeInt4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False)

    def encode(layer: nn.Linear) -> None:
        quantize_(layer, settings, filter_fn=lambda layer, fqn: True)

    layers = quantized_layers(model, blocks, kind)
    if kind == "int8" and device_type == "cpu":
        from fsdp_shard.inference.int8 import encode_in_rows, use_int8_products

        return Quantizer(use_int8_products(model, layers), lambda layer: encode_in_rows(layer, encode))
    return Quantizer(layers, encode)


def _takes(layer: nn.Module, kind: str) -> bool:
    from torch import nn

    return type(layer) is nn.Linear and (kind == "int8" or layer.in_features % _GROUP == 0)


def _bytes(layer: nn.Linear, kind: str) -> int:
    """Bytes of a quantized weight: the numbers, and a scale a row or a scale and zero point a group."""
    rows, width = layer.weight.shape
    of_row = width + layer.weight.element_size() if kind == "int8" else width // 2 + width // _GROUP * 4
    return rows * of_row
