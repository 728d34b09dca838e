"""Weights in 8 or 4 bits: 64 neighbours at a time become a row of bytes, their codes and one float32 scale.

A row holds all that is needed for its 64 weights, so rows may be cut, moved and filled anywhere, and what is in them
depends on the weights alone. Pure functions of tensors; knows no module, no file and no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
