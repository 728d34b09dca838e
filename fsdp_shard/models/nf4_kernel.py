"""Decodes rows of nf4 weights on a GPU by one Triton kernel, where operators of torch would need ten for each part.

bitsandbytes' kernel wants codes and scales in two arrays, to which rows, sharded as they lie, would have to be copied
at each use. Triton comes with torch's builds for CUDA.
"""

import warnings
from functools import cache

import torch
import triton
import triton.language as tl

_ROWS = tl.constexpr(64)  # decoded by each program
_PAIRS = tl.constexpr(32)  # bytes of codes in a row, each of two weights
_ROW_BYTES = tl.constexpr(36)


@triton.jit
def _decode_rows(codes, scales, levels, out, num_rows, num_weights):  # type: ignore[no-untyped-def]  # Triton's types
    row = (tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)).to(tl.int64)[:, None]  # [rows, 1]
    pair = tl.arange(0, _PAIRS)[None, :]  # [1, pairs]
    is_row = row < num_rows
    byte = tl.load(codes + row * _ROW_BYTES + pair, mask=is_row, other=0).to(tl.int32)  # two weights, upper half first
    scale = tl.load(scales + row * (_ROW_BYTES // 4) + _PAIRS // 4, mask=is_row, other=0.0)
    first = tl.load(levels + (byte >> 4)) * scale
    second = tl.load(levels + (byte & 15)) * scale
    place = row * (2 * _PAIRS) + 2 * pair
    tl.store(out + place, first.to(out.dtype.element_ty), mask=is_row & (place < num_weights))
    tl.store(out + place + 1, second.to(out.dtype.element_ty), mask=is_row & (place + 1 < num_weights))


def decode_nf4(rows: torch.Tensor, levels: torch.Tensor, num_weights: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode the first `num_weights` weights, flat: computed in float32, rounded to `dtype`.

    Args:
        rows: Codes and scales [num_rows, 36], uint8, contiguous: 32 bytes of codes and a float32 scale.
        levels: The values of the codes [16], float32, on the same device.
        num_weights: At most 64 in each row.
        dtype: That of the result.
    """
    rows = rows.contiguous()
    num_rows = len(rows)
    out = torch.empty(num_weights, dtype=dtype, device=rows.device)
    grid = (triton.cdiv(num_rows, _ROWS.value),)
    _decode_rows[grid](rows, rows.view(torch.float32), levels, out, num_rows, num_weights)
    return out


@cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernel runs on this GPU; Triton needs a C compiler, and supports only some GPUs."""
    rows = torch.zeros(1, 36, dtype=torch.uint8, device=device)
    try:
        decode_nf4(rows, torch.zeros(16, device=device), 64, torch.bfloat16)
    except Exception as error:  # of any type: a compiler's, a driver's
        warnings.warn(f"nf4 weights are decoded by operators of torch, several times slower: {error}", stacklevel=2)
        return False
    return True
