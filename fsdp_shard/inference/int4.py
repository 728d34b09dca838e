"""`quantize=int4`: weights in 4 bits, with a scale and a zero point per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.inference.quantization import Layers, Quantization, Quantizer, torchao_encoder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Int4(Quantization):
    """torchao's weight-only int4; `group_size` weights of a row share a scale and a zero point."""

    group_size: int = 32

    def takes(self, layer: nn.Linear) -> bool:
        return layer.in_features % self.group_size == 0

    def num_bytes(self, layer: nn.Linear) -> int:
        rows, width = layer.weight.shape
        return rows * (width // 2 + width // self.group_size * 4)

    def quantizer(self, model: nn.Module, layers: Layers, device_type: str) -> Quantizer:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int4WeightOnlyConfig

        config = Int4WeightOnlyConfig if device_type == "cuda" else PrototypeInt4WeightOnlyConfig
        return Quantizer(layers, torchao_encoder(config(group_size=self.group_size, set_inductor_config=False)))
