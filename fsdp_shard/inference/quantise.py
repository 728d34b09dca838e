"""Weights of a block's linear layers in 8 or 4 bits, by torchao, as soon as the block is loaded.

Only the repeated blocks are quantised: embeddings and the output head, which lose most by it, keep their type. What a
layer cannot take (4 bits want a width that 32 divides) stays as it is, and is counted so. Only this imports torchao.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from torch import nn

    from fsdp_shard.blocks import Block
    from fsdp_shard.inference.device_plan import DevicePlan

_GROUP = 32  # weights that share a scale in 4 bits


def check_quantise(kind: str, setting: str) -> None:
    """Raise ConfigError when torchao, which `kind` needs, is not installed."""
    if kind != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{setting}={kind} needs torchao, which is not installed: pip install 'fsdp-shard[quantize]'."
        )


def quantised_blocks(model: nn.Module, blocks: Sequence[Block], kind: str) -> list[Block]:
    """`blocks` with the bytes that they will have."""
    if kind == "none":
        return list(blocks)
    return [
        replace(block, num_bytes=_bytes(model.get_submodule(block.fqn), kind)) if block.repeated else block
        for block in blocks
    ]


def check_stays(plan: DevicePlan, kind: str) -> None:
    """Raise PlanError when a block is streamed: it would be quantised anew for each token."""
    streamed = [fqn for fqn in plan.devices if plan.is_streamed(fqn)]
    if kind != "none" and streamed:
        raise PlanError(
            f"dispatch.quantize={kind} is for models that fit when quantised, and {len(streamed)} blocks "
            f"({streamed[0]} first) would be on disk or beside the GPU that computes; give more memory, or leave "
            "quantize out."
        )


def make_quantiser(kind: str, device_type: str) -> Callable[[nn.Module], None] | None:
    """What quantises the linear layers inside a module, whose weights must be there; None for `none`."""
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

    def quantise(module: nn.Module) -> None:
        quantize_(module, settings, filter_fn=lambda layer, fqn: _takes(layer, kind))

    return quantise


def _takes(layer: nn.Module, kind: str) -> bool:
    from torch import nn

    return type(layer) is nn.Linear and (kind == "int8" or layer.in_features % _GROUP == 0)


def _bytes(block: nn.Module, kind: str) -> int:
    """Bytes of a block's parameters when quantised: weights, and a scale a row or a scale and zero point a group."""
    total = 0
    for layer in block.modules():
        for name, param in layer._parameters.items():
            if param is None:
                continue
            if name == "weight" and _takes(layer, kind):
                rows, width = param.shape
                of_row = width + param.element_size() if kind == "int8" else width // 2 + width // _GROUP * 4
                total += rows * of_row
            else:
                total += param.numel() * param.element_size()
    return total
