"""What one rank writes and reads of a step: where the rest of a chunk lies that begins in its part, and by whom."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint import idle
from fsdp_shard.checkpoint.integrity import CHUNK_BYTES, chunk_digest, file_digest
from fsdp_shard.checkpoint.layout import Extent
from fsdp_shard.checkpoint.ranges import (
    RankPlans,
    _pieces,
    as_it_is,
    create_files,
    hash_shared_chunks,
    plan_heads,
    write_ranges,
)
from fsdp_shard.checkpoint.writes import Target, WritePlan, plan_sharded_writes
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


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has threads that run at idle")
@pytest.mark.parametrize("is_behind", [True, False])
def test_a_save_behind_the_training_reads_writes_and_hashes_at_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    monkeypatch.setattr(idle, "_PATIENCE_SECONDS", 60.0)  # as tests keep all cores busy
    data = torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.float32)  # one and a half chunks
    parts = [data[:1000], data[1000:]]
    starts = [0, 1000]
    policies = []

    def reading(shard: LocalShard, part: slice) -> AbstractContextManager[memoryview]:
        policies.append(os.sched_getscheduler(0))
        return as_it_is(shard, part)

    everyone = []
    for rank, (part, start) in enumerate(zip(parts, starts, strict=True)):
        weights = {"w": LocalShard(part, part, start, (len(data),), writes=True)}
        target = Target(rank, 2, 1, "save", None, {})
        plans = RankPlans(plan_sharded_writes(weights, target), plan_sharded_writes(weights, target), {})
        create_files(tmp_path, plans)
        hashers, records = write_ranges(tmp_path, plans, weights, weights, reading, is_behind)
        everyone.append((weights, hashers, plan_heads(plans.weights, weights), records))

    hasher = everyone[0][1]["w"]
    assert hasher is not None
    finish = hasher.finish

    def finish_watched(piece: memoryview) -> None:
        policies.append(os.sched_getscheduler(0))
        finish(piece)

    monkeypatch.setattr(hasher, "finish", finish_watched)
    num_written = len(policies)
    assert {policy == os.SCHED_IDLE for policy in policies} == {is_behind}
    found: dict[int, bytes] = {}
    for weights, hashers, _, _ in everyone:
        found |= hash_shared_chunks(tmp_path, weights, hashers, [heads for _, _, heads, _ in everyone], is_behind)["w"]
    assert len(policies) == num_written + 1, "the rest of the first chunk is hashed"
    assert (policies[-1] == os.SCHED_IDLE) == is_behind
    whole = data.numpy().tobytes()
    expected = [chunk_digest(whole[at : at + CHUNK_BYTES]) for at in range(0, len(whole), CHUNK_BYTES)]
    assert [found[number] for number in sorted(found)] == expected
    for _, _, _, records in everyone:
        for name, record in records.items():
            assert record.digest in (None, file_digest(tmp_path / name))
