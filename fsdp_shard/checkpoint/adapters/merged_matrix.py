"""Matrices of a merged model, computed range by range while reading.

W + scale * B @ A, in float32, rounded once; and W with other values in some of its rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Factors = Callable[[], tuple[torch.Tensor, torch.Tensor]]
    Read = Callable[[], torch.Tensor]

_CHUNK_ELEMENTS = 1 << 22  # of a matrix, read at a time to compute column norms


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """A matrix of `base` plus the product of two thin ones, [rows, r] and [r, columns], scaled afterwards as in peft.

    In a stack of matrices, it is the one that begins at element `first`. Finite values must stay finite: peft silently
    merges NaN and infinities.
    """

    base: TensorIndex
    entry: TensorEntry
    adapter: Path
    factors: Factors = field(repr=False)
    scale: float
    first: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry.shape[-2:]) * itemsize(self.entry.dtype)

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        self.base.reader.read_into(self.entry, self.first + start, out)
        values = torch.frombuffer(out, dtype=to_torch(self.entry.dtype))
        self.check_finite(values, merged := self.plus_product(values, start).to(values.dtype))
        values.copy_(merged)

    def plus_product(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return the elements `values` of the matrix, from `start`, plus those of the product, in float32."""
        import torch

        left, right = self.factors()
        columns, stop = self.entry.shape[-1], start + len(values)
        first, last = start // columns, -(-stop // columns)
        product = (left[first:last] @ right).view(-1)[start - first * columns : stop - first * columns]
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return wide + product * self.scale

    def check_finite(self, values: torch.Tensor, merged: torch.Tensor) -> None:
        """Raise CheckpointError if finite `values` of the base became non-finite in the merge."""
        if not merged.isfinite().all() and (values.isfinite() & ~merged.isfinite()).any():
            raise CheckpointError(
                f"{self.adapter}: merged into {self.entry.name} of {self.base.path}, it makes values that are NaN, or "
                f"too large for {torch_name(self.entry.dtype)}; its factors or its scale ({self.scale:g}) are damaged, "
                f"or the base must be stored in a wider dtype."
            )


@dataclass(frozen=True)
class ScaledSum:
    """A merged matrix of DoRA, which scales the weights of each output to a trained norm.

    The outputs are its rows, or its columns if it is stored transposed; column norms require reading the whole matrix.
    """

    merged: LowRankSum
    read_magnitudes: Read = field(repr=False)
    is_transposed: bool

    @property
    def num_bytes(self) -> int:
        return self.merged.num_bytes

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        dtype, columns = to_torch(self.merged.entry.dtype), self.merged.entry.shape[1]
        values = torch.frombuffer(out, dtype=dtype)
        rows = range(start // columns, -(-(start + len(values)) // columns))
        base, sums = self._rows(rows)
        if self.is_transposed:
            factors = self._column_factors
        else:
            factors = (self.read_magnitudes().float()[rows.start : rows.stop] / torch.linalg.norm(sums, dim=1))[:, None]
        first = start - rows.start * columns
        merged = (factors * sums).to(dtype).view(-1)[first : first + len(values)]
        self.merged.check_finite(base[first : first + len(values)], merged)
        values.copy_(merged)

    @functools.cached_property
    def _column_factors(self) -> torch.Tensor:
        import torch

        num_rows, columns = self.merged.entry.shape
        per_chunk = max(1, _CHUNK_ELEMENTS // columns)
        squares = torch.zeros(columns, dtype=torch.float64)
        for first in range(0, num_rows, per_chunk):
            squares += self._rows(range(num_rows)[first : first + per_chunk])[1].double().square().sum(dim=0)
        return self.read_magnitudes().float() / squares.sqrt().float()

    def _rows(self, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the base, flat, and the same with the product added, in float32, [rows, columns]."""
        import torch

        entry, columns = self.merged.entry, self.merged.entry.shape[1]
        base = torch.empty(len(rows) * columns, dtype=to_torch(entry.dtype))
        self.merged.base.reader.read_into(entry, rows.start * columns, tensor_bytes(base))
        return base, self.merged.plus_product(base, rows.start * columns).view(len(rows), columns)


@dataclass(frozen=True)
class ReplacedRows:
    """A matrix of `base` in which `rows` have other values."""

    base: TensorIndex
    entry: TensorEntry
    rows: list[int]
    read_rows: Read = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry.shape) * itemsize(self.entry.dtype)

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        self.base.reader.read_into(self.entry, start, out)
        values = torch.frombuffer(out, dtype=to_torch(self.entry.dtype))
        columns, stop, new = self.entry.shape[1], start + len(values), self.read_rows()
        for number, row in enumerate(self.rows):
            first, last, begin = max(start, row * columns), min(stop, (row + 1) * columns), row * columns
            if first < last:
                values[first - start : last - start] = new[number, first - begin : last - begin]
