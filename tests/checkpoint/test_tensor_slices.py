from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from fsdp_shard.checkpoint import tensor_slices

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(0, total - start))


@st.composite
def shape_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = draw(shapes)
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, offsets, tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True))


@given(shape_and_range())
def test_flat_range_splits_into_few_boxes_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, count = case
    split = tensor_slices.flat_boxes(shape, start, count)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in split]
    assert torch.equal(torch.cat(found) if found else numbers.new_empty(0), torch.arange(start, start + count))
    assert len(split) <= max(2 * len(shape) - 1, 1)
    assert all(tensor_slices.is_contiguous(shape, box) for _, box in split)


@given(shape_and_box(), st.data())
def test_runs_of_a_box_are_its_elements_in_the_range(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, offsets, box = case
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = torch.arange(total).reshape(shape)
    flat = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))].reshape(-1).tolist()
    expected = [(value, at) for at, value in enumerate(flat) if start <= value < stop]
    found = [
        (position + i, inside + i)
        for position, inside, n in tensor_slices.runs(shape, offsets, box, start, stop)
        for i in range(n)
    ]
    assert found == expected
    together = tensor_slices.strided_runs(shape, offsets, box, start, stop)
    assert expected == [
        (part.at + row * part.step + i, part.inside + row * part.size + i)
        for part in together
        for row in range(part.repeats)
        for i in range(part.size)
    ]


def test_a_column_is_one_strided_run() -> None:
    (column,) = tensor_slices.strided_runs((100, 3, 8), (0, 0, 2), (100, 3, 4), 0, 2400)
    assert column == (2, 0, 4, 300, 8)


def test_coverage_finds_gaps_overlaps_and_strays() -> None:
    halves = [((0, 0), (4, 3)), ((0, 3), (4, 3))]
    assert tensor_slices.coverage_problem((4, 6), halves) is None
    assert "hold 12 of 24" in str(tensor_slices.coverage_problem((4, 6), halves[:1]))
    assert "overlap" in str(tensor_slices.coverage_problem((4, 6), [*halves, ((3, 5), (1, 1))]))
    assert "outside" in str(tensor_slices.coverage_problem((4, 6), [((0, 0), (4, 7))]))
    assert "dimensions" in str(tensor_slices.coverage_problem((4, 6), [((0,), (4,))]))
    assert "overlap" in str(tensor_slices.coverage_problem((), [((), ()), ((), ())]))
    assert "hold 0 of 1" in str(tensor_slices.coverage_problem((), []))
    assert tensor_slices.coverage_problem((0, 3), []) is None


@pytest.mark.timeout(10)
def test_many_boxes_that_overlap_end_soon() -> None:
    size = 4000
    stairs = [((i, i), (size - i, 1)) for i in range(size)]
    assert "pieces hold" in str(tensor_slices.coverage_problem((size, size), stairs))
