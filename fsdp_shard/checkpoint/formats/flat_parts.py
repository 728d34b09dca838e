"""Tensors that lie end to end in flat vectors, which are cut over several files: DeepSpeed's ZeRO partitions. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.index import Piece
from fsdp_shard.checkpoint.io.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements of one dtype in a file, from byte `start` on."""

    file: str
    start: int
    num_elements: int


def length(vector: Sequence[Segment]) -> int:
    """Elements of a vector that is these segments end to end."""
    return sum(segment.num_elements for segment in vector)


def pieces(
    vector: Sequence[Segment], at: int, shape: tuple[int, ...], first: int, num_elements: int, dtype: str
) -> Iterator[Piece]:
    """The pieces that make up the flat elements [first, first + num_elements) of a tensor of `shape`.

    They lie in the vector from its element `at` on; where it ends before, there are fewer of them.
    """
    position = 0
    for segment in vector:
        low, high = max(at, position), min(at + num_elements, position + segment.num_elements)
        if low < high:
            start = segment.start + (low - position) * itemsize(dtype)
            for offsets, box in tensor_slices.flat_boxes(shape, first + low - at, high - low):
                yield Piece(segment.file, start, offsets, box)
                start += math.prod(box) * itemsize(dtype)
        position += segment.num_elements
