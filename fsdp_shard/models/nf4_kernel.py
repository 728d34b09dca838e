"""Decodes rows of nf4 weights on a GPU with one Triton kernel, where torch operators would launch ten for each part.

bitsandbytes' kernel needs codes and scales in two arrays, to which the sharded rows would have to be copied at each
use. Triton comes with torch's builds for CUDA.
"""

import warnings
from functools import cache

import torch
import triton
import triton.language as tl

_ROWS = tl.constexpr(32)  # decoded by each program
_WORDS = tl.constexpr(8)  # of a row: 32 bits each, of eight weights; a ninth is the scale


@triton.jit
def _decode_rows(words, scales, levels, out, num_rows, num_weights):  # type: ignore[no-untyped-def]  # Triton's types
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    word = tl.arange(0, _WORDS)
    nibble = tl.arange(0, 8)
    is_row = row < num_rows
    start = row.to(tl.int64) * (_WORDS + 1)
    codes = tl.load(words + start[:, None] + word[None, :], mask=is_row[:, None], other=0)  # [rows, words]
    scale = tl.load(scales + start + _WORDS, mask=is_row, other=0.0)  # [rows]
    shift = 8 * (nibble // 2) + 4 * (1 - nibble % 2)  # in each byte the upper half comes first
    code = (codes[:, :, None] >> shift[None, None, :]) & 15  # [rows, words, 8]
    weights = tl.load(levels + code) * scale[:, None, None]
    # Flat, so that the threads of a warp write neighboring weights.
    place = tl.program_id(0).to(tl.int64) * (64 * _ROWS) + tl.arange(0, 64 * _ROWS)
    tl.store(out + place, tl.reshape(weights, (64 * _ROWS,)).to(out.dtype.element_ty), mask=place < num_weights)


def decode_nf4(rows: torch.Tensor, levels: torch.Tensor, num_weights: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode the first `num_weights` weights, flat: computed in float32, rounded to `dtype`.

    Args:
        rows: Codes and scales [num_rows, 36], uint8, contiguous: 32 bytes of codes and a float32 scale.
        levels: The values of the codes [16], float32, on the same device.
        num_weights: At most 64 in each row.
        dtype: Dtype of the result.
    """
    rows = rows.contiguous()
    num_rows = len(rows)
    out = torch.empty(num_weights, dtype=dtype, device=rows.device)
    grid = (triton.cdiv(num_rows, _ROWS.value),)
    with torch.cuda.device_of(rows):  # Triton runs on the current one
        _decode_rows[grid](rows.view(torch.int32), rows.view(torch.float32), levels, out, num_rows, num_weights)
    return out


@cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernel runs on this GPU; Triton needs a C compiler, and supports only some GPUs."""
    rows = torch.zeros(1, 36, dtype=torch.uint8, device=device)
    try:
        decode_nf4(rows, torch.zeros(16, device=device), 64, torch.bfloat16)
    except Exception as error:  # any type: from a compiler or a driver
        warnings.warn(f"nf4 weights are decoded by operators of torch, several times slower: {error}", stacklevel=2)
        return False
    return True
