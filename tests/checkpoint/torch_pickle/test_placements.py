"""Placement arithmetic agrees with torch's own, and the ranks of a mesh together hold each element."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_shard.checkpoint.tensor_slices import coverage_problem
from fsdp_shard.checkpoint.torch_pickle.placements import Placement, local_boxes, local_spans

REPLICATE = Placement("replicate")


def shard(dim: int, split_factor: int = 1) -> Placement:
    return Placement("shard", dim, split_factor)


def as_torch(placement: Placement) -> Any:
    if placement.kind == "replicate":
        return Replicate()
    strided = _StridedShard(placement.dim, split_factor=placement.split_factor)
    return strided if placement.split_factor > 1 else Shard(placement.dim)


CASES: list[tuple[tuple[int, ...], tuple[int, ...], Sequence[Placement]]] = [
    ((7,), (3,), [shard(0)]),
    ((2, 5), (4,), [shard(0)]),
    ((5, 9), (4,), [shard(1)]),
    ((0, 3), (2,), [shard(0)]),
    ((), (2,), [REPLICATE]),
    ((10, 6), (2, 2), [shard(0), REPLICATE]),
    ((10, 6), (2, 2), [REPLICATE, shard(1)]),
    ((10, 6), (2, 2), [shard(0), shard(0)]),
    ((10, 6), (2, 2), [shard(0, 2), shard(0)]),
    ((11, 6), (2, 3), [shard(0, 3), shard(0)]),
    ((3, 6), (2, 4), [shard(0, 4), shard(0)]),
    ((10, 7), (3, 2), [shard(0), shard(1)]),
    ((12,), (2, 2), [shard(0), shard(0, 3)]),
    ((9, 8, 7), (2, 2, 2), [shard(2), shard(0, 2), shard(0)]),
]


def random_case(seed: int) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    choose = random.Random(seed)
    shape = tuple(choose.randrange(0, 14) for _ in range(choose.randrange(1, 4)))
    mesh = tuple(choose.randrange(1, 5) for _ in range(choose.randrange(1, 4)))
    placements = [
        choose.choice([REPLICATE, shard(choose.randrange(len(shape))), shard(choose.randrange(len(shape)), 2)])
        for _ in mesh
    ]
    return shape, mesh, placements


@pytest.mark.parametrize("case", [*CASES, *map(random_case, range(150))], ids=str)
def test_agrees_with_torch(case: Any) -> None:
    shape, mesh, placements = case
    held: list[Any] = []
    for coordinate in itertools.product(*map(range, mesh)):
        spans = local_spans(shape, mesh, coordinate, placements)
        expected_shape, expected_offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), [as_torch(placement) for placement in placements]
        )
        assert tuple(sum(stop - start for start, stop in ranges) for ranges in spans) == expected_shape
        if math.prod(expected_shape):
            assert tuple(ranges[0][0] for ranges in spans) == expected_offset
        boxes = [box for _, box in local_boxes(spans) if math.prod(box[1])]
        assert sum(math.prod(size) for _, size in boxes) == math.prod(expected_shape)
        held += boxes
    copies = math.prod(size for size, placement in zip(mesh, placements, strict=True) if placement.kind == "replicate")
    distinct = list(dict.fromkeys(held))
    assert len(held) == copies * len(distinct)
    assert coverage_problem(shape, distinct) is None


def test_partial_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="partial sums"):
        local_spans((4,), (2,), (0,), [Placement("partial")])


def test_a_dimension_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="dimension 2 of 1"):
        local_spans((4,), (2,), (0,), [shard(2)])
