"""What one rank writes of a step, and the chunks that start in its part and end in the parts of other ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, chunk_digest, file_digest
from fsdp_shard.checkpoint.sharded_state import write_shards
from fsdp_shard.checkpoint.sharded_state.write_plan import LAYOUTS, Target, WritePlan, plan_optimizer_writes
from fsdp_shard.checkpoint.tensor_entry import Piece
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import StorageError

Box = tuple[tuple[int, ...], tuple[int, ...]]
NUM_ELEMENTS = 5 * CHUNK_BYTES // 8  # float32: two and a half chunks


def test_only_ranges_that_start_inside_a_chunk_and_boxes_are_shared() -> None:
    elements = CHUNK_BYTES // 2

    def shard(start: int, box: Box | None = None) -> LocalShard:
        data = torch.zeros(8, dtype=torch.bfloat16)
        return LocalShard(data, data, start, (4 * elements,), writes=True, box=box)

    shards = {"first": shard(0), "aligned": shard(elements), "cut": shard(elements + 3), "box": shard(5, ((5,), (8,)))}
    offsets = {name: ("file", 100 * number) for number, name in enumerate(shards)}
    expected = {"cut": [Piece("file", 200, (elements + 3,), (8,))], "box": [Piece("file", 300, (5,), (8,))]}
    assert write_shards.shared_pieces(WritePlan([], offsets), shards) == expected
    assert write_shards.shared_pieces(WritePlan([], offsets, scatters=True), shards) == {}


def written(directory: Path, layout: str, ranks: list[LocalShard]) -> list[dict[int, bytes]]:
    """The digests of tensor w from each rank, after all ranks have written their parts of it."""
    everyone = []
    for rank, shard in enumerate(ranks):
        weights, target = {"w": shard}, Target(rank, len(ranks), 1, "save", None, {})
        plans = write_shards.RankPlans(LAYOUTS[layout](weights, target), plan_optimizer_writes(weights, target))
        write_shards.create_files(directory, plans)
        everyone.append((weights, plans))
    pieces = [write_shards.shared_pieces(plans.weights, weights) for weights, plans in everyone]
    results = [
        write_shards.write_ranges(directory, plans, weights, weights, write_shards.read_shard)
        for weights, plans in everyone
    ]
    for (weights, plans), (digests, records) in zip(everyone, results, strict=True):
        write_shards.hash_shared_chunks(directory, plans.weights, weights, digests, pieces)
        for name, record in records.items():
            assert record.digest in (None, file_digest(directory / name))
    return [digests.get("w", {}) for digests, _ in results]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_a_matrix_are_hashed_as_rows_of_the_tensor(layout: str, tmp_path: Path) -> None:
    data = torch.arange(NUM_ELEMENTS, dtype=torch.float32).view(-1, 10)
    ranks = []
    for first, width in ((0, 4), (4, 3), (7, 3)):
        part = data[:, first : first + width].contiguous().view(-1)
        ranks.append(LocalShard(part, part, first, tuple(data.shape), True, box=((0, first), (len(data), width))))
    check_digests(written(tmp_path, layout, ranks), data)


def test_a_file_that_was_cut_short_is_an_error_of_the_disk(tmp_path: Path) -> None:
    data = torch.ones(8)
    shards = {"w": LocalShard(data[:4], data[:4], 0, (8,), writes=True)}
    plan = WritePlan([], {"w": ("own", 0)})
    (tmp_path / "own").write_bytes(bytes(16))
    (tmp_path / "other").write_bytes(bytes(10))
    pieces = [{"w": [Piece("other", 0, (4,), (4,))]}]
    with pytest.raises(StorageError, match=f"{tmp_path}/other ends at byte 10"):
        write_shards.hash_shared_chunks(tmp_path, plan, shards, {"w": {}}, pieces)


def test_a_part_of_a_chunk_that_nobody_writes_is_a_bug(tmp_path: Path) -> None:
    data = torch.ones(8)
    shards = {"w": LocalShard(data[:4], data[:4], 0, (8,), writes=True)}
    with pytest.raises(AssertionError):
        write_shards.hash_shared_chunks(tmp_path, WritePlan([], {"w": ("own", 0)}), shards, {"w": {}}, [])
