"""Linear layers with weights in 8 bits on the CPU: made a few rows at a time, and multiplied as they are.

torchao makes several float32 copies of a weight to quantize it, and a bfloat16 one for each product. Here the first are
of a few rows, and for a few tokens the second is left out: torch has a product that reads the 8 bits
(`_weight_int8pack_mm`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_PIECE = 1 << 18  # numbers that are quantized at once
_MOST_ROWS = 64  # tokens; of more, torchao's copy of the weight is a small part
_WIDTHS = 32  # torch's product reads so many numbers of a row at once, and past the end of one that has a rest


class Int8Linear(nn.Linear):
    """A linear layer whose `weight` is torchao's Int8Tensor with one scale a row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() > _MOST_ROWS * self.in_features:
            return super().forward(input)
        weight: Any = self.weight
        rows = input.reshape(-1, self.in_features).contiguous()  # [tokens, in]
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
            rows, weight.qdata, weight.scale.flatten().to(input.dtype)
        )
        out = out.reshape(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def use_int8_products(model: nn.Module, layers: Mapping[str, Sequence[nn.Linear]]) -> dict[str, list[nn.Linear]]:
    """Put an Int8Linear with the same parameters in the place of each of `layers`, and return what is there then.

    Layers whose width torch's product does not take stay.
    """
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}

    def replaced(layer: nn.Linear) -> nn.Linear:
        if layer.in_features % _WIDTHS:
            return layer
        new = Int8Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
        new.weight, new.bias = layer.weight, layer.bias
        model.set_submodule(names[layer], new)
        return new

    return {fqn: [replaced(layer) for layer in its] for fqn, its in layers.items()}


def encode_in_rows(layer: nn.Linear, encode: Callable[[nn.Linear], None]) -> None:
    """Give `layer` the weight that `encode` makes of its rows; each has a scale of its own, so it is the same."""
    rows, width = layer.weight.shape
    qdata = torch.empty(rows, width, dtype=torch.int8)
    scale = torch.empty(rows, 1)
    step = max(1, _PIECE // width)
    for start in range(0, rows, step):
        piece = nn.Linear(width, step, bias=False, device="meta")
        piece.weight = nn.Parameter(layer.weight[start : start + step], requires_grad=False)
        encode(piece)
        part: Any = piece.weight
        piece.__dict__.pop("extra_repr", None)  # torchao's, which has a hold of `piece`: its memory would stay
        qdata[start : start + step] = part.qdata
        scale[start : start + step] = part.scale
    whole = type(part)(qdata, scale, part.block_size, part.dtype, zero_point=torch.zeros(rows, 1, dtype=torch.int8))
    layer.weight = nn.Parameter(whole, requires_grad=False)
