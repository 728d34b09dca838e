"""`quantize=int8`: weights in 8 bits, with one scale per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.inference.quantization import Layers, Quantization, Quantizer, torchao_encoder

if TYPE_CHECKING:
    from torch import nn


class Int8(Quantization):
    """torchao's weight-only int8, with this package's matrix product on CPUs."""

    bits = 8
    takes_head = True

    def num_bytes(self, layer: nn.Linear, *, on_gpu: bool) -> int:
        rows, width = layer.weight.shape
        return rows * (width + layer.weight.element_size())

    def quantizer(self, model: nn.Module, layers: Layers, execution_device: int | str) -> Quantizer:
        from torchao.quantization import Int8WeightOnlyConfig

        from fsdp_shard.inference import int8_linear

        encode = torchao_encoder(Int8WeightOnlyConfig(set_inductor_config=False))
        if execution_device != "cpu":
            return Quantizer(layers, encode)
        replaced = int8_linear.use_int8_products(model, layers)
        return Quantizer(replaced, lambda layer: int8_linear.encode_in_rows(layer, encode))
