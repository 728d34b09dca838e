"""What one rank writes and reads of a step: here, where the rest of a chunk lies that begins in its part."""

from __future__ import annotations

import pytest
import torch

from fsdp_shard.checkpoint.integrity import CHUNK_BYTES
from fsdp_shard.checkpoint.layout import Extent
from fsdp_shard.checkpoint.ranges import _pieces, plan_heads
from fsdp_shard.checkpoint.writes import WritePlan
from fsdp_shard.shards import LocalShard

HEADS = [Extent(300, 900, "third", 70), Extent(100, 120, "first", 10), Extent(120, 300, "second", 5)]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (range(100, 110), [Extent(100, 110, "first", 10)]),
        (range(110, 120), [Extent(110, 120, "first", 20)]),
        (
            range(100, 400),
            [Extent(100, 120, "first", 10), Extent(120, 300, "second", 5), Extent(300, 400, "third", 70)],
        ),
        (range(250, 301), [Extent(250, 300, "second", 135), Extent(300, 301, "third", 70)]),
    ],
)
def test_the_rest_of_a_chunk_may_lie_with_several_ranks(rest: range, expected: list[Extent]) -> None:
    assert list(_pieces(rest, HEADS)) == expected


@pytest.mark.parametrize("rest", [range(90, 110), range(850, 901)])
def test_a_rest_that_nobody_writes_is_a_bug(rest: range) -> None:
    with pytest.raises(AssertionError, match="a rank writes what follows"):
        list(_pieces(rest, HEADS))


def test_ranges_that_begin_with_a_chunk_are_nobodys_rest() -> None:
    elements = CHUNK_BYTES // 2

    def shard(start: int, box: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> LocalShard:
        data = torch.zeros(8, dtype=torch.bfloat16)
        return LocalShard(data, data, start, (4 * elements,), writes=True, box=box)

    shards = {"first": shard(0), "whole": shard(elements), "cut": shard(elements + 3), "box": shard(5, ((5,), (8,)))}
    places = {name: ("file", 100 * number) for number, name in enumerate(shards)}
    start = 2 * (elements + 3)
    assert plan_heads(WritePlan([], places), shards) == {"cut": Extent(start, start + 16, "file", 200)}
