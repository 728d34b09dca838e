"""What one rank writes and reads of a step, and which other ranks have the rest of a chunk that starts in its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, RangeHasher, chunk_digest, file_digest
from fsdp_shard.checkpoint.sharded_state.write_plan import Target, WritePlan, plan_sharded_writes
from fsdp_shard.checkpoint.sharded_state.write_shards import (
    RankPlans,
    _pieces,
    create_files,
    hash_shared_chunks,
    read_shard,
    unaligned_ranges,
    write_ranges,
)
from fsdp_shard.checkpoint.steps.file_plan import Extent
from fsdp_shard.distributed import LocalShard

RANGES = [Extent(300, 900, "third", 70), Extent(100, 120, "first", 10), Extent(120, 300, "second", 5)]


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
    assert list(_pieces(rest, RANGES)) == expected


@pytest.mark.parametrize("rest", [range(90, 110), range(850, 901)])
def test_a_rest_that_nobody_writes_is_a_bug(rest: range) -> None:
    with pytest.raises(AssertionError, match="a rank writes what follows"):
        list(_pieces(rest, RANGES))


def test_ranges_that_start_with_a_chunk_are_no_ones_rest() -> None:
    elements = CHUNK_BYTES // 2

    def shard(start: int, box: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> LocalShard:
        data = torch.zeros(8, dtype=torch.bfloat16)
        return LocalShard(data, data, start, (4 * elements,), writes=True, box=box)

    shards = {"first": shard(0), "whole": shard(elements), "cut": shard(elements + 3), "box": shard(5, ((5,), (8,)))}
    offsets = {name: ("file", 100 * number) for number, name in enumerate(shards)}
    start = 2 * (elements + 3)
    assert unaligned_ranges(WritePlan([], offsets), shards) == {"cut": Extent(start, start + 16, "file", 200)}


def test_what_two_ranks_write_is_hashed_as_a_whole(tmp_path: Path) -> None:
    data = torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.float32)  # one and a half chunks
    everyone = []
    for rank, (part, start) in enumerate([(data[:1000], 0), (data[1000:], 1000)]):
        weights = {"w": LocalShard(part, part, start, (len(data),), writes=True)}
        target = Target(rank, 2, 1, "save", None, {})
        plans = RankPlans(plan_sharded_writes(weights, target), plan_sharded_writes(weights, target), {})
        create_files(tmp_path, plans)
        hashers, records = write_ranges(tmp_path, plans, weights, weights, read_shard)
        everyone.append((weights, hashers, unaligned_ranges(plans.weights, weights), records))

    found: dict[int, bytes] = {}
    ranges = [theirs for _, _, theirs, _ in everyone]
    for weights, hashers, _, _ in everyone:
        found |= hash_shared_chunks(tmp_path, weights, hashers, ranges)["w"]
    whole = data.numpy().tobytes()
    expected = [chunk_digest(whole[at : at + CHUNK_BYTES]) for at in range(0, len(whole), CHUNK_BYTES)]
    assert [found[number] for number in sorted(found)] == expected
    for _, _, _, records in everyone:
        for name, record in records.items():
            assert record.digest in (None, file_digest(tmp_path / name))


def test_a_file_that_was_cut_short_is_an_error_of_the_disk(tmp_path: Path) -> None:
    data = torch.ones(8)
    shards = {"w": LocalShard(data[:4], data[:4], 0, (8,), writes=True)}
    hasher = RangeHasher(32, 0, 16)
    hasher.update(bytes(16))
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(OSError, match="shorter") as raised:
        hash_shared_chunks(tmp_path, shards, {"w": hasher}, [{"w": Extent(16, 32, "file", 0)}])
    assert raised.value.filename == str(tmp_path / "file")
