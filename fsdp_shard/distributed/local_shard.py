"""A rank's shard of a tensor, as every wrapper and every checkpoint format understands it.

FSDP2 gives a rank some rows of each parameter; FSDP1 gives it a range of a flattened unit. Both are one contiguous
range of the row-major elements of each logical tensor. Tensor parallelism also divides columns: then it is a box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's elements [start, start + len(data)) of a row-major tensor.

    Attributes:
        tensor: The parameter or buffer as the model and the optimizer know it.
        data: Flat view [num_elements] of this rank's own memory; writing into it changes the model.
        start: Offset of the first element in the row-major tensor.
        shape: Shape of the whole tensor.
        writes: Whether this rank writes the elements into a checkpoint: exactly one rank of those that hold them does.
        box: (offsets, shape) of the shard if `data` are the elements of a box, row by row, instead of a flat range.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def view_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return the flat local elements [num_elements] of an optimizer state that has the shape of the parameter."""
        from torch.distributed.tensor import DTensor

        local = state.to_local() if isinstance(state, DTensor) else state
        assert local.numel() == self.data.numel(), (local.shape, self.data.shape)
        return local.view(-1)


def row_major_range(shape: Sequence[int], rows: range) -> tuple[int, int]:
    """Return (start, length), in elements, of `rows` of a row-major tensor of `shape`."""
    row = math.prod(shape[1:])
    return rows.start * row, len(rows) * row
