"""Boxes in a row-major tensor: splits a flat range of elements into boxes, and a box into flat runs.

Pure arithmetic on tuples. A box is (offsets, shape), with one number for each dimension.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NUM_ALWAYS_SEARCHED = 1000
_NUM_COMPARED = 256  # per piece, on average: twice the ranks along the second dimension of a mesh
Box = tuple[tuple[int, ...], tuple[int, ...]]


def flat_boxes(shape: Sequence[int], start: int, count: int) -> list[Box]:
    """Split a flat range of elements into boxes that are contiguous in the tensor.

    Args:
        shape: Shape of the tensor.
        start: First element of the range.
        count: Number of elements.

    Returns:
        The boxes in flat order, at most 2 * ndim - 1: a ragged start, whole rows, a ragged end, and the same again
        inside the ragged ones.
    """
    if count == 0:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, inside = divmod(start, row)
    boxes: list[Box] = []
    if inside:  # starts inside a row: take the part in this row first
        part = min(row - inside, count)
        boxes += _within_row(first, flat_boxes(shape[1:], inside, part))
        first, count = first + 1, count - part
    rows, rest = divmod(count, row)
    if rows:
        boxes.append(((first, *[0] * (len(shape) - 1)), (rows, *shape[1:])))
    if rest:
        boxes += _within_row(first + rows, flat_boxes(shape[1:], 0, rest))
    return boxes


def _within_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, *offsets), (1, *shape)) for offsets, shape in boxes]


def inner_axis(shape: Sequence[int], box: Sequence[int]) -> int:
    """Return the last axis along which the box is narrower than the tensor, or 0: the axis of its runs."""
    axis = len(shape) - 1
    while axis > 0 and box[axis] == shape[axis]:
        axis -= 1
    return axis


def is_contiguous(shape: Sequence[int], box: Sequence[int]) -> bool:
    """Return whether the box is one flat run of the tensor, at any offsets."""
    return not shape or math.prod(box[: inner_axis(shape, box)]) == 1


def run_elements(shape: Sequence[int], box: Sequence[int]) -> int:
    """Return the number of elements in each flat run of the box."""
    axis = inner_axis(shape, box)
    return math.prod(box[axis:])


def flat_start(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the flat position of a box's first element."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements; dimensions of size 0 count as 1, as in torch."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


class FlatOrder(NamedTuple):
    """Boxes in flat order: the flat position of each one's first element, and the largest flat extent of a box."""

    starts: list[int]
    extent: int

    def overlapping(self, start: int, stop: int) -> slice:
        """Return a slice of the boxes that may hold elements of the flat range [start, stop): all others do not."""
        return slice(bisect.bisect_right(self.starts, start - self.extent), bisect.bisect_left(self.starts, stop))


def flat_order(shape: Sequence[int], boxes: Sequence[Box]) -> FlatOrder:
    """Return the order of boxes sorted by first element."""
    starts = [flat_start(shape, offsets) for offsets, _ in boxes]
    return FlatOrder(starts, max((flat_extent(shape, box) for _, box in boxes), default=0))


def flat_extent(shape: Sequence[int], box: Sequence[int]) -> int:
    """Return the number of elements from a box's first to its last one in the tensor; 0 if it is empty."""
    return flat_start(shape, [size - 1 for size in box]) + 1 if 0 not in box else 0


def intersection(one: Box, two: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    offsets = tuple(map(max, one[0], two[0]))
    shape = tuple(
        min(a + n, b + m) - low for a, n, b, m, low in zip(one[0], one[1], two[0], two[1], offsets, strict=True)
    )
    return (offsets, shape) if all(size > 0 for size in shape) else None


def contains(shape: Sequence[int], offsets: Sequence[int], box: Sequence[int], position: int) -> bool:
    """Return whether the element at a flat `position` of the tensor is in the box."""
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(box), strict=True):
        position, at = divmod(position, extent)
        if not offset <= at < offset + size:
            return False
    return True


def runs(
    shape: Sequence[int], offsets: Sequence[int], box: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a box that are in the flat range [start, stop) of the tensor.

    Yields:
        (flat position in the tensor, flat position in the box, number of elements), in order.
    """
    if not shape:
        if start <= 0 < stop:
            yield 0, 0, 1
        return
    axis = inner_axis(shape, box)
    length = box[axis] * math.prod(shape[axis + 1 :])
    if not length or stop <= start:
        return
    outer = [range(size) for size in box[:axis]]
    if axis:  # only rows that the range touches: walking over a tensor by ranges stays linear
        row = math.prod(shape[1:])
        low, high = start // row - offsets[0], -(-stop // row) - offsets[0]
        outer[0] = range(max(low, 0), min(high, box[0]))
    for index in itertools.product(*outer):
        in_box = flat_start(box[:axis], index) * length
        outer_offsets = [a + b for a, b in zip(offsets[:axis], index, strict=True)]
        in_tensor = flat_start(shape, (*outer_offsets, *offsets[axis:]))
        low, high = max(start, in_tensor), min(stop, in_tensor + length)
        if low < high:
            yield low, in_box + low - in_tensor, high - low


class StridedRuns(NamedTuple):
    """Runs that are equidistant in the tensor and contiguous in the box.

    Attributes:
        at: Flat position of the first run in the tensor.
        inside: Its flat position in the box.
        size: Elements of each run.
        repeats: Number of runs.
        step: Elements from the start of one run to that of the next, in the tensor.
    """

    at: int
    inside: int
    size: int
    repeats: int
    step: int


def strided_runs(
    shape: Sequence[int], offsets: Sequence[int], box: Sequence[int], start: int, stop: int
) -> Iterator[StridedRuns]:
    """Yield `runs` joined across neighboring rows: a matrix column is a single item, except for ragged ends."""
    axis = inner_axis(shape, box)
    row, inner = math.prod(shape[axis:]), math.prod(shape[axis + 1 :])
    edges = [(start, stop)]
    if axis > 0 and 0 not in box and tuple(box[1:axis]) == tuple(shape[1:axis]):
        # Treat it as a matrix with rows of `row` elements, of which the box holds whole columns.
        above = math.prod(shape[1:axis])
        shape, offsets = (shape[0] * above, row), (offsets[0] * above, offsets[axis] * inner)
        box = (box[0] * above, box[axis] * inner)
        first = max(offsets[0], -(-(start - offsets[1]) // row))
        last = min(offsets[0] + box[0], (stop - offsets[1] - box[1]) // row + 1)
        if first < last:
            edges = [(start, first * row), (last * row, stop)]
    for number, (low, high) in enumerate(edges):
        if number:
            yield StridedRuns(first * row + offsets[1], (first - offsets[0]) * box[1], box[1], last - first, row)
        for at, inside, count in runs(shape, offsets, box, low, high):
            yield StridedRuns(at, inside, count, 1, row)


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe what is wrong with `boxes` as a partition of the tensor; None if each element is in exactly one."""
    if _are_rows_in_order(shape, boxes):
        return None
    for offsets, box in boxes:
        if len(offsets) != len(shape) or len(box) != len(shape):
            return f"a piece has {len(box)} dimensions where the tensor has {len(shape)}"
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, box, shape, strict=True)):
            return f"the piece at {list(offsets)} of shape {list(box)} is outside the shape {list(shape)}"
    filled = [(offsets, box) for offsets, box in boxes if math.prod(box)]
    stored, expected = sum(math.prod(box) for _, box in filled), math.prod(shape)
    # The search is slow only for boxes made to slow it down; those do not add up to the tensor.
    if stored == expected or len(filled) <= _NUM_ALWAYS_SEARCHED:
        try:
            clash = _overlap(shape, filled)
        except OverflowError:
            return f"its {len(filled)} pieces are in no order that ranks would write"
        if clash is not None:
            return f"the pieces at {list(clash[0])} and {list(clash[1])} overlap"
    if stored != expected:
        return f"its pieces hold {stored} of {expected} elements"
    return None


def _are_rows_in_order(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether each box is whole rows that follow those of the box before, as in nearly all checkpoints."""
    row, zeros, at = tuple(shape[1:]), (0,) * (len(shape) - 1), 0
    for offsets, box in boxes:
        if len(box) != len(shape) or box[1:] != row or offsets[1:] != zeros or offsets[:1] != (at,) or box[0] < 0:
            return False
        at += box[0]
    return bool(shape) and at == shape[0]


def _overlap(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of two overlapping boxes, or None; OverflowError if each must be compared with most others."""
    if not shape:
        return (boxes[0][0], boxes[1][0]) if len(boxes) > 1 else None
    # Sweep along the axis with most distinct offsets: rank files (sharded on any one dim) then take linear time.
    axis = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    open_boxes: list[Box] = []
    num_compared = 0
    for offsets, box in sorted(boxes, key=lambda item: item[0][axis]):
        open_boxes = [(o, b) for o, b in open_boxes if o[axis] + b[axis] > offsets[axis]]
        num_compared += len(open_boxes)
        if num_compared > _NUM_COMPARED * max(len(boxes), _NUM_ALWAYS_SEARCHED):
            raise OverflowError
        for other, other_box in open_boxes:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, box, other, other_box, strict=True)):
                return other, offsets
        open_boxes.append((offsets, box))
    return None
