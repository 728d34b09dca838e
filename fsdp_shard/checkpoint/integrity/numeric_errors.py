"""Numeric errors between two tensors: largest absolute and relative error, and cosine similarity.

Computes in float64 with numpy. Only float8 numbers need torch.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_shard.checkpoint.io import to_torch

_BLOCK = 1 << 14  # elements: the temporaries of a block stay in the cache
_NATIVE = {"C64": "<c8", "BOOL": "u1"} | {
    f"{letter}{8 * size}": f"<{kind}{size}"
    for letter, kind, sizes in (("F", "f", (2, 4, 8)), ("I", "i", (1, 2, 4, 8)), ("U", "u", (1, 2, 4, 8)))
    for size in sizes
}


def decode(dtype: str, data: memoryview) -> Any:
    """Return the numbers in `data` as a numpy array of their dtype if numpy has it, else of exact floats."""
    if dtype in _NATIVE:
        return np.frombuffer(data, _NATIVE[dtype])
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    import torch

    return torch.frombuffer(data, dtype=to_torch(dtype)).float().numpy()


@dataclass
class Errors:
    """The errors between tensors `a` and `b`, accumulated over their parts.

    `num_different` counts unequal elements; -0.0 equals 0.0, and NaN equals NaN. `num_special` counts those of them
    where one is NaN or infinite and the other is finite or a different special value; all other figures exclude them.
    `max_relative` is |a - b| over the larger of |a| and |b|: at most 2, and 0 if both are 0. Complex numbers count by
    absolute value. Integers of one type are subtracted exactly.
    """

    num_different: int = 0
    num_special: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    worst: int = 0
    """Flat position of the largest absolute error."""
    _dot: float = 0.0
    _norm_a: float = 0.0
    _norm_b: float = 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine similarity: 1 if both are zero, 0 if one is, None if float64 overflows."""
        if not (self._norm_a and self._norm_b):
            return 1.0 if self._norm_a == self._norm_b else 0.0
        scale = math.sqrt(self._norm_a) * math.sqrt(self._norm_b)
        return max(-1.0, min(1.0, self._dot / scale)) if math.isfinite(scale) and math.isfinite(self._dot) else None

    def add(self, a: Any, b: Any, start: int) -> None:
        """Add the elements from flat position `start` on, as `decode` returns them."""
        for at in range(0, len(a), _BLOCK):
            self._add_block(a[at : at + _BLOCK], b[at : at + _BLOCK], start + at)

    def merge(self, other: Errors) -> None:
        """Add the errors of another part of the same tensors."""
        if other.max_absolute > self.max_absolute:
            self.max_absolute, self.worst = other.max_absolute, other.worst
        self.max_relative = max(self.max_relative, other.max_relative)
        self.num_different += other.num_different
        self.num_special += other.num_special
        self._dot += other._dot
        self._norm_a += other._norm_a
        self._norm_b += other._norm_b

    def _add_block(self, a: Any, b: Any, start: int) -> None:
        with np.errstate(all="ignore"):
            distance = _integer_distance(a, b) if a.dtype.kind in "iu" and a.dtype == b.dtype else None
            wide = "c16" if "c" in (a.dtype.kind, b.dtype.kind) else "f8"
            a, b = a.astype(wide), b.astype(wide)
            if distance is None:
                distance = np.abs(a - b)
            if not math.isfinite(float(distance.sum())):
                a, b, distance = self._without_special(a, b)
            self.num_different += int(np.count_nonzero(distance))
            largest = np.maximum(np.abs(a), np.abs(b))
            relative = float((distance / np.maximum(largest, sys.float_info.min)).max())
            self._dot += _dot(a, b)
            self._norm_a += _dot(a, a)
            self._norm_b += _dot(b, b)
        worst = int(distance.argmax())
        self.max_relative = max(self.max_relative, relative)
        if distance[worst] > self.max_absolute:
            self.max_absolute, self.worst = float(distance[worst]), start + worst

    def _without_special(self, a: Any, b: Any) -> tuple[Any, Any, Any]:
        """Return the block with 0 where either is not finite, after counting the special differences."""
        finite = np.isfinite(a) & np.isfinite(b)
        count = int(np.count_nonzero(~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))))
        self.num_special += count
        self.num_different += count
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        return a, b, np.minimum(np.abs(a - b), sys.float_info.max)


def _dot(a: Any, b: Any) -> float:
    """Return the dot product of two arrays of float64, or of complex numbers as pairs of them.

    `np.dot` would be 40 times slower on two cores: BLAS splits each block over all cores, and two threads that do so
    wait for each other.
    """
    return float(np.einsum("i,i->", a.view("f8"), b.view("f8")))


def _integer_distance(a: Any, b: Any) -> Any:
    """Return |a - b| of two arrays of one integer type, even where it does not fit that type."""
    unsigned = a.dtype.str.replace("i", "u")
    return (np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)).astype("f8")
