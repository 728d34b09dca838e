"""Weights in 8 or 4 bits: 64 neighbors at a time become a row of bytes, their codes and one float32 scale.

A row holds all that is needed for its 64 weights, so rows may be cut, moved and filled anywhere, and what is in them
depends on the weights alone. Pure functions of tensors; knows no module, no file and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

BLOCK = 64  # weights that share a scale, as in QLoRA

_SCALE_BYTES = 4
_DECODED_AT_ONCE = 1 << 22  # weights: what is made on the way to them takes up to 8 bytes each

# The 4-bit NormalFloat of Dettmers et al., QLoRA (2023): equally likely quantiles of a normal distribution, and 0.
_NORMAL = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Code:
    """How 64 weights become `code_bytes` bytes and back. `to_codes` and `to_values` work on blocks, [n, 64] float32.

    `to_codes` gives the codes of blocks that were divided by their largest weight; a decoded weight is its value of
    `to_values` times that largest weight.
    """

    name: str
    code_bytes: int
    to_codes: Callable[[torch.Tensor], torch.Tensor]
    to_values: Callable[[torch.Tensor], torch.Tensor]

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + _SCALE_BYTES

    @property
    def bits(self) -> float:
        """Of a weight, with its part of the scale."""
        return 8 * self.row_bytes / BLOCK

    def num_rows(self, num_weights: int) -> int:
        """Rows of a matrix of so many weights; the last one may not be full."""
        return -(-num_weights // BLOCK)

    def encode(self, weights: torch.Tensor) -> torch.Tensor:
        """The rows [num_rows, row_bytes], uint8, of flat finite float32 `weights`; what the last one lacks is 0."""
        blocks = F.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = self.to_codes(blocks / torch.where(largest > 0, largest, 1.0))
        return torch.cat([codes.view(torch.uint8), largest.view(torch.uint8)], dim=1)

    def decode(self, rows: torch.Tensor, num_weights: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `num_weights` weights, flat, of `rows`: computed in float32, rounded to `dtype`."""
        weights = torch.empty((len(rows), BLOCK), dtype=dtype, device=rows.device)
        step = _DECODED_AT_ONCE // BLOCK
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            largest = part[:, self.code_bytes :].contiguous().view(torch.float32)
            weights[start : start + step] = self.to_values(part[:, : self.code_bytes].contiguous()) * largest
        return weights.view(-1)[:num_weights]

    def scratch_bytes(self, num_weights: int, itemsize: int) -> int:
        """Memory that `decode` takes at its fullest, its result with `itemsize` bytes a weight included."""
        return num_weights * itemsize + 8 * min(num_weights, _DECODED_AT_ONCE)


def _to_int8(blocks: torch.Tensor) -> torch.Tensor:
    return (blocks * 127).round().to(torch.int8)


def _from_int8(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).float() / 127


def _to_nf4(blocks: torch.Tensor) -> torch.Tensor:
    """The numbers of the nearest levels, two in a byte, the first one in its upper half."""
    levels = _levels(blocks.device)
    codes = torch.bucketize(blocks, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def _from_nf4(codes: torch.Tensor) -> torch.Tensor:
    levels = _levels(codes.device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)  # [256, 2]: of each byte
    return F.embedding(codes.view(-1).int(), pairs).view(-1, BLOCK)


def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(_NORMAL, dtype=torch.float32).to(device, non_blocking=True)


CODES = {
    "int8": Code("int8", BLOCK, _to_int8, _from_int8),
    "nf4": Code("nf4", BLOCK // 2, _to_nf4, _from_nf4),
}


class QuantizedWeight(nn.Module):
    """x -> x @ W.T, with W of `shape` [out, in] in `rows` on the meta device, held as elements of `held_as`.

    A module of its own, so that the rows can be gathered apart from what is cast.
    """

    def __init__(self, shape: tuple[int, int], code: Code, held_as: torch.dtype) -> None:
        super().__init__()
        self.shape, self.code = shape, code
        width, rest = divmod(code.row_bytes, held_as.itemsize)
        assert not rest, "a row is a whole number of elements"
        rows = torch.empty(code.num_rows(self.num_weights), width, dtype=held_as, device="meta")
        self.rows = nn.Parameter(rows, requires_grad=False)

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(inputs, self.rows, self.code, self.shape)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        return f"{self.code.name}, shape={list(self.shape)}"


class QuantizedLinear(nn.Module):
    """What takes the place of the frozen `linear`, whose bias it keeps."""

    def __init__(self, linear: nn.Linear, code: Code, held_as: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self._dtype = linear.in_features, linear.out_features, dtype
        self.quantized = QuantizedWeight((linear.out_features, linear.in_features), code, held_as)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """For models that look at the type and shape of a layer's weight (T5): one without values, on meta."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.quantized(inputs)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """inputs [..., in] @ W.T, in the type of the inputs. Only the rows are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, rows: torch.Tensor, code: Code, shape: tuple[int, int]) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(rows)
        ctx.code, ctx.shape = code, shape
        return F.linear(inputs, _decode(rows, code, shape, inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (rows,) = ctx.saved_tensors
        return slope @ _decode(rows, ctx.code, ctx.shape, slope.dtype), None, None, None


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Those in `model`, by FQN."""
    for fqn, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield fqn, module


def num_weights(model: nn.Module) -> dict[str, int]:
    """Of each parameter of `model`, by FQN, how many weights it stands for: its elements, unless they are bytes."""
    found = {name: param.numel() for name, param in model.named_parameters()}
    return found | {f"{fqn}.rows": module.num_weights for fqn, module in quantized_weights(model)}


def scratch_bytes(model: nn.Module, itemsize: int) -> int:
    """Memory for the largest decoded weight of `model`, in a type of `itemsize` bytes."""
    weights = (module for _, module in quantized_weights(model))
    return max((module.code.scratch_bytes(module.num_weights, itemsize) for module in weights), default=0)


def _decode(rows: torch.Tensor, code: Code, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return code.decode(rows.view(torch.uint8), shape[0] * shape[1], dtype).view(shape)
