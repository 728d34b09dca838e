"""Linear layers with 8-bit weights on the CPU: quantized a few rows at a time, and multiplied without dequantizing.

torchao makes several float32 copies of a weight to quantize it, and a bfloat16 copy for each product. Here the former
cover only a few rows, and the latter is avoided for small numbers of tokens: torch has a product that reads the 8 bits
(`_weight_int8pack_mm`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fsdp_shard.utils import int8_matmul

_CHUNK = 1 << 18  # elements to quantize at once
_MAX_TOKENS = 64  # for more tokens, torchao's weight copy is a small part of the work
_ALIGNMENT = 32  # torch's product reads this many elements of a row at once, and past the row's end for a remainder


class Int8Linear(torch.nn.Linear):
    """A linear layer whose `weight` is torchao's Int8Tensor with one scale per row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply `input` [..., in_features]; without a copy of the weight for up to 64 tokens."""
        if input.numel() > _MAX_TOKENS * self.in_features:
            return super().forward(input)
        weight: Any = self.weight
        rows = input.reshape(-1, self.in_features).contiguous()  # [tokens, in]
        out = int8_matmul(rows, weight.qdata, weight.scale.flatten().to(input.dtype))
        out = out.reshape(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def use_int8_products(
    model: torch.nn.Module, layers: Mapping[str, Sequence[torch.nn.Linear]]
) -> dict[str, list[torch.nn.Linear]]:
    """Replace `layers` of `model` with Int8Linear layers that share their parameters.

    Args:
        model: The model.
        layers: Linear layers, by the FQN of their block.

    Returns:
        The layers now in the model; layers whose width torch's product does not support are unchanged.
    """
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}

    def replaced(layer: torch.nn.Linear) -> torch.nn.Linear:
        if layer.in_features % _ALIGNMENT:
            return layer
        new = Int8Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
        new.weight, new.bias = layer.weight, layer.bias
        model.set_submodule(names[layer], new)
        return new

    return {fqn: [replaced(layer) for layer in its] for fqn, its in layers.items()}


def encode_in_rows(layer: torch.nn.Linear, encode: Callable[[torch.nn.Linear], None]) -> None:
    """Quantize the weight of `layer` a few rows at a time; each row has its own scale, so the result is identical."""
    rows, width = layer.weight.shape
    qdata = torch.empty(rows, width, dtype=torch.int8)
    scale = torch.empty(rows, 1, dtype=torch.float32)
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        chunk = torch.nn.Linear(width, step, bias=False, device="meta")
        chunk.weight = torch.nn.Parameter(layer.weight[start : start + step], requires_grad=False)
        encode(chunk)
        part: Any = chunk.weight
        chunk.__dict__.pop("extra_repr", None)  # torchao's extra_repr refers to `chunk`, which would keep its memory
        qdata[start : start + step] = part.qdata
        scale[start : start + step] = part.scale
    joined = type(part)(qdata, scale, part.block_size, part.dtype, zero_point=torch.zeros(rows, 1, dtype=torch.int8))
    layer.weight = torch.nn.Parameter(joined, requires_grad=False)
