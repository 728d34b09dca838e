"""What one rank writes of a step, and the chunks that start in its part and end in the parts of other ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, chunk_digest, file_digest
from fsdp_shard.checkpoint.sharded_state import write_shards
from fsdp_shard.checkpoint.sharded_state.write_plan import LAYOUTS, Target, plan_folder_writes
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, build_shard_index
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import StorageError

TARGET = Target(0, 1, 1, "save", None, {})
NUM_ELEMENTS = 5 * CHUNK_BYTES // 8  # float32: two and a half chunks


def written(directory: Path, layout: str, ranks: list[LocalShard]) -> list[dict[int, bytes]]:
    """The digests of tensor w from each rank, after all ranks have written their parts of it."""
    everyone = []
    for rank, shard in enumerate(ranks):
        weights, target = {"w": shard}, Target(rank, len(ranks), 1, "save", None, {})
        others = {folder: plan_folder_writes(folder, weights, target) for folder in ("optimizer", "ema")}
        plans = write_shards.RankPlans(LAYOUTS[layout](weights, target), others)
        write_shards.create_files(directory, plans)
        everyone.append((weights, plans))
    reports = [plans.weights.report for _, plans in everyone if plans.weights.report is not None]
    if len(reports) == len(everyone):
        (directory / SHARD_INDEX).write_bytes(build_shard_index(reports, 1, "save", {}))
    results = [
        write_shards.write_ranges(
            directory, plans, weights, {"optimizer": weights, "ema": weights}, write_shards.read_shard
        )
        for weights, plans in everyone
    ]
    for (weights, plans), found in zip(everyone, results, strict=True):
        write_shards.hash_shared_chunks(directory, plans.weights, weights, found)
        for name, record in found.records.items():
            assert record.digest in (None, file_digest(directory / name))
    assert not any(found.parts for found in results), "these are no small tensors"
    return [found.digests.get("w", {}) for found in results]


def check_digests(found: list[dict[int, bytes]], data: torch.Tensor) -> None:
    content = data.numpy().tobytes()
    chunks = [chunk_digest(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES)]
    assert sum(map(len, found)) == len(chunks), "each chunk is hashed by one rank"
    assert {number: digest for rank in found for number, digest in rank.items()} == dict(enumerate(chunks))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "cuts",
    [[], [1000], [1000, 1000], [CHUNK_BYTES // 4], [7, 50, 51, 1000], [3, CHUNK_BYTES // 4 + 1, CHUNK_BYTES // 2 - 1]],
)
def test_chunks_that_ranks_share_are_hashed_whoever_holds_their_parts(
    layout: str, cuts: list[int], tmp_path: Path
) -> None:
    data = torch.arange(NUM_ELEMENTS, dtype=torch.float32)
    ranks = [
        LocalShard(data[start:stop], data[start:stop], start, (NUM_ELEMENTS,), writes=True)
        for start, stop in pairwise([0, *cuts, NUM_ELEMENTS])
    ]
    check_digests(written(tmp_path, layout, ranks), data)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_a_matrix_are_hashed_as_rows_of_the_tensor(layout: str, tmp_path: Path) -> None:
    data = torch.arange(NUM_ELEMENTS, dtype=torch.float32).view(-1, 10)
    ranks = []
    for first, width in ((0, 4), (4, 3), (7, 3)):
        part = data[:, first : first + width].contiguous().view(-1)
        ranks.append(LocalShard(part, part, first, tuple(data.shape), True, box=((0, first), (len(data), width))))
    check_digests(written(tmp_path, layout, ranks), data)


def test_parts_of_a_small_tensor_are_kept_for_one_rank_to_hash() -> None:
    data = torch.arange(100, dtype=torch.float32)
    for stop in (40, 100):
        shard = LocalShard(data[:stop], data[:stop], 0, (100,), writes=True)
        with TemporaryDirectory() as folder:
            plans = write_shards.RankPlans(LAYOUTS["sharded"]({"w": shard}, TARGET), {})
            write_shards.create_files(Path(folder), plans)
            found = write_shards.write_ranges(Path(folder), plans, {"w": shard}, {}, write_shards.read_shard)
            write_shards.hash_shared_chunks(Path(folder), plans.weights, {"w": shard}, found)
        is_whole = stop == 100
        assert found.parts == ({} if is_whole else {"w": (0, data[:stop].numpy().tobytes())})
        assert list(found.digests["w"]) == ([0] if is_whole else [])


def test_a_file_that_was_cut_short_is_an_error_of_the_disk(tmp_path: Path) -> None:
    data = torch.zeros(NUM_ELEMENTS)
    ranks = [LocalShard(part, part, start, (NUM_ELEMENTS,), writes=True) for start, part in enumerate(data.split(1000))]
    ranks = [replace(shard, start=1000 * number) for number, shard in enumerate(ranks)]
    everyone = []
    for rank, shard in enumerate(ranks):
        plans = write_shards.RankPlans(
            LAYOUTS["sharded"]({"w": shard}, replace(TARGET, rank=rank, world_size=len(ranks))), {}
        )
        write_shards.create_files(tmp_path, plans)
        everyone.append(plans)
    reports = [plans.weights.report for plans in everyone if plans.weights.report is not None]
    assert len(reports) == len(everyone)
    (tmp_path / SHARD_INDEX).write_bytes(build_shard_index(reports, 1, "save", {}))
    found = write_shards.write_ranges(tmp_path, everyone[0], {"w": ranks[0]}, {}, write_shards.read_shard)
    other = tmp_path / everyone[1].weights.creates[0].name
    os.truncate(other, other.stat().st_size - 10)
    with pytest.raises(StorageError, match=f"{other} has .* bytes"):
        write_shards.hash_shared_chunks(tmp_path, everyone[0].weights, {"w": ranks[0]}, found)


def test_a_part_that_nobody_writes_is_a_bug() -> None:
    data = torch.ones(8)
    shard = LocalShard(data[:4], data[:4], 0, (8,), writes=True)
    report = LAYOUTS["sharded"]({"w": shard}, TARGET).report
    assert report is not None
    with pytest.raises(AssertionError, match="w is not written whole"):
        build_shard_index([report], 1, "save", {})
