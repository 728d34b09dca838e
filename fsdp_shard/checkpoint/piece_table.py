"""The pieces of a tensor that many ranks wrote, created on demand.

A thousand ranks hold a thousand pieces of each of a thousand tensors. The pieces are similar: tensors of one shape are
divided in the same way, and files of one layout have them at the same offsets. All tensors of an index therefore share
divisions and layouts (`Division`, `RankFiles`), in which a tensor is just a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.tensor_entry import Piece
from fsdp_shard.checkpoint.tensor_slices import Box, FlatOrder


class Held(NamedTuple):
    """A rank's part of a tensor: `num_elements` elements from the flat element `start`, or a box."""

    rank: int
    start: int
    num_elements: int
    box: Box | None = None


class _Part(NamedTuple):
    """A box, and the index of its first element in the rank's part."""

    rank: int
    inside: int
    box: Box


@dataclass(frozen=True)
class Division:
    """The division of tensors of a shape over the ranks; `held` lists each rank at most once."""

    shape: tuple[int, ...]
    held: tuple[Held, ...]

    @cached_property
    def parts(self) -> list[_Part]:
        """The boxes in flat order."""
        found = []
        for held in self.held:
            inside = 0
            for box in self._boxes(held):
                found.append(_Part(held.rank, inside, box))
                inside += math.prod(box[1])
        return sorted(found, key=lambda part: tensor_slices.flat_start(self.shape, part.box[0]))

    def _boxes(self, held: Held) -> list[Box]:
        if held.box is not None:
            return [held.box]
        whole = [((0,) * len(self.shape), self.shape)]  # for a tensor without elements
        return tensor_slices.flat_boxes(self.shape, held.start, held.num_elements) or whole

    @cached_property
    def order(self) -> FlatOrder:
        """The starts of the boxes, for finding those of a range."""
        return tensor_slices.flat_order(self.shape, [part.box for part in self.parts])

    def problem(self) -> str | None:
        """The reason why it is not a partition of the tensor; None if each element is held once."""
        position, total = 0, math.prod(self.shape)
        for held in self.held:
            if held.box is None and (held.start + held.num_elements > total or bool(held.num_elements) != bool(total)):
                return f"a rank holds {held.num_elements} of {total} elements from element {held.start} on"
        if any(held.box is not None for held in self.held):
            boxes = [box for held in self.held for box in self._boxes(held)]
            return tensor_slices.coverage_problem(self.shape, boxes)
        for held in sorted(self.held, key=lambda held: (held.start, held.num_elements)):
            if held.start < position:
                return f"the ranges that begin at element {held.start} and before it overlap"
            if held.start > position:
                return f"no rank holds the elements from {position} to {held.start}"
            position += held.num_elements
        if not self.held or position != total:
            return f"its ranges hold {position} of {total} elements"
        return None


@dataclass(frozen=True)
class RankFiles:
    """The files of all ranks: names, header sizes, and the index of each file's layout in `layouts`.

    A layout maps the number of a tensor to the offset of its first byte after the header.
    """

    names: Sequence[str]
    header_bytes: Sequence[int]
    layout_of: Sequence[int]
    layouts: Sequence[Mapping[int, int]]

    def position(self, rank: int, tensor: int) -> int:
        """The absolute byte offset of a tensor in the file of a rank."""
        return self.header_bytes[rank] + self.layouts[self.layout_of[rank]][tensor]


class PieceTable(Sequence[Piece]):
    """The pieces of one tensor, in flat order.

    Args:
        division: The division of the tensor.
        files: The files of the pieces.
        tensor: The tensor's number in the layouts of the files.
        item_bytes: Bytes of an element.
    """

    def __init__(self, division: Division, files: RankFiles, tensor: int, item_bytes: int) -> None:
        self._division, self._files, self._tensor, self._item_bytes = division, files, tensor, item_bytes

    @property
    def order(self) -> FlatOrder:
        """The starts of the pieces in the tensor."""
        return self._division.order

    @property
    def files(self) -> set[str]:
        """The names of the files that hold the pieces."""
        return {self._files.names[held.rank] for held in self._division.held}

    def __len__(self) -> int:
        return len(self._division.parts)

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...

    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        found = self._division.parts[index]
        return [self._piece(part) for part in found] if isinstance(found, list) else self._piece(found)

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, self._division.parts)

    def _piece(self, part: _Part) -> Piece:
        start = self._files.position(part.rank, self._tensor) + part.inside * self._item_bytes
        return Piece(self._files.names[part.rank], start, *part.box)
