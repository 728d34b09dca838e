"""A rank's part of a tensor, as every wrapper and every checkpoint format here understands it.

FSDP2 gives a rank some rows of each parameter; FSDP1 gives it a range of a flattened unit. Both are one contiguous
range of the row-major elements of each logical tensor. Tensor parallelism also cuts columns: then it is a box. These
are the only words that sharding and checkpoints share. Knows neither of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's elements [start, start + len(data)) of a row-major tensor of `shape`.

    `data` is a flat view [num_elements] of the rank's own memory: writing into it changes the model. `tensor` is the
    parameter or buffer as the model and the optimizer know it. Exactly one rank of those that hold the same elements
    `writes` them into a checkpoint.

    With a `box`, (offsets, shape), `data` are the elements of that box instead, row by row; `start` is its first one's.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def view_of(self, state: torch.Tensor) -> torch.Tensor:
        """The flat local elements [num_elements] of an optimizer state that has the parameter's own shape."""
        from torch.distributed.tensor import DTensor

        local = state.to_local() if isinstance(state, DTensor) else state
        assert local.numel() == self.data.numel(), (local.shape, self.data.shape)
        return local.view(-1)


def row_major_range(shape: Sequence[int], rows: range) -> tuple[int, int]:
    """(start, length) in elements of rows `rows` of a row-major tensor of `shape`."""
    row = 1
    for extent in shape[1:]:
        row *= extent
    return rows.start * row, len(rows) * row
