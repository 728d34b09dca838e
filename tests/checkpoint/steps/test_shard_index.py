"""The index of rank files: it says what their headers say, is refused where it does not, and saves opening them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint.formats import native_sharded
from fsdp_shard.checkpoint.integrity.step_integrity import check_content
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.io import TensorSpec
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.sharded_state.load_shards import load_shards
from fsdp_shard.checkpoint.sharded_state.save_step import StepContent, save_step
from fsdp_shard.checkpoint.steps.file_plan import SHARD_KEY, chunk_rows, plan_sharded
from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.shard_headers import has_described_headers
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, RankFileSummary, read_shard_index
from fsdp_shard.checkpoint.steps.step_store import StepStore
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import CheckpointError
from tests.faults.corpus.edits import seal
from tests.support.ranks import on_ranks

SHAPES = {"a.weight": (8, 300_000), "b.weight": (6, 50), "norm.weight": (11,), "scale": (), "empty": (0, 4)}
Division = Callable[[tuple[int, ...], int, int], tuple[int, int]]


def values_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(SHAPES[name], generator=generator)


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """As FSDP2 divides rows; a scalar goes to rank 0."""
    if not shape:
        return 0, int(rank == 0)
    row, per_rank = int(torch.Size(shape[1:]).numel()), -(-shape[0] // ranks)
    start, stop = min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0])
    return start * row, (stop - start) * row


def ragged(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """Ranges that begin and end inside rows, as FSDP1 divides them."""
    total = torch.Size(shape).numel()
    edges = [0, *sorted(random.Random(total).choices(range(total + 1), k=ranks - 1)), total]
    return edges[rank], edges[rank + 1] - edges[rank]


def shards_of(rank: int, ranks: int, division: Division, *, columns: bool = False) -> dict[str, LocalShard]:
    found = {}
    for name, shape in SHAPES.items():
        whole = values_of(name)
        if columns and len(shape) > 1 and whole.numel():
            width = shape[1] // ranks
            part = whole[:, rank * width : (rank + 1) * width].reshape(-1).clone()
            box = ((0, rank * width), (shape[0], width))
            found[name] = LocalShard(part, part, rank * width, shape, True, box)
            continue
        start, count = division(shape, rank, ranks)
        part = whole.reshape(-1)[start : start + count].clone()
        found[name] = LocalShard(part, part, start, shape, True)
    return found


def save(context: DistributedContext, root: Path, division: Division, columns: bool) -> None:
    weights = shards_of(context.rank, context.world_size, division, columns=columns)
    states = {f"{name}.exp_avg": shard for name, shard in weights.items()}
    save_step(context, StepStore(root), 1, StepContent(weights, {}, states), layout="sharded")


def saved(root: Path, ranks: int = 4, division: Division = rows, *, columns: bool = False) -> Path:
    on_ranks(ranks, save, root, division, columns)
    return StepStore(root).path(1)


@pytest.mark.parametrize(
    ("ranks", "division", "columns"), [(1, rows, False), (3, rows, False), (4, ragged, False), (2, rows, True)]
)
def test_the_index_says_what_the_headers_say(ranks: int, division: Division, columns: bool, tmp_path: Path) -> None:
    step = saved(tmp_path, ranks, division, columns=columns)
    for folder in (step, step / "optimizer"):
        said, found = native_sharded.read(folder), native_sharded.read_headers(folder)
        assert has_described_headers(folder, read_shard_index(folder)), "so that verify makes no pieces of them"
        assert said.headers
        assert not found.headers
        assert said.tensors.keys() == found.tensors.keys()
        assert len(said.tensors) == len(SHAPES)
        assert all(said.tensors[name].is_stored_as(entry) for name, entry in found.tensors.items())
        assert (said.step, said.world_size, said.metadata) == (found.step, found.world_size, found.metadata)
    assert verify(step).is_sound
    for part in range(3):
        check_content(step, part, 3)
    with open_checkpoint(step) as index:
        assert all(torch.equal(index.read(name), values_of(name)) for name in SHAPES)
    manifest = json.loads((step / MANIFEST).read_text())
    assert {SHARD_INDEX, f"optimizer/{SHARD_INDEX}"} <= manifest["files"].keys()


def test_steps_without_an_index_are_read_as_before(tmp_path: Path) -> None:
    step = saved(tmp_path)
    (step / SHARD_INDEX).unlink()
    with open_checkpoint(step) as index:
        assert not index.headers
        assert all(torch.equal(index.read(name), values_of(name)) for name in SHAPES)


@dataclass
class Opens:
    """Names of the rank files that this process has opened since; it cannot be ended, so a process has one."""

    def __post_init__(self) -> None:
        self.names: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "shard-" in str(arguments[0]):
            self.names.append(Path(str(arguments[0])).name.split("-")[1])


def resume(context: DistributedContext, root: Path) -> dict[str, list[str]]:
    """The ranks whose files this rank opens to save, to load its rows, then its columns, and to check its part."""
    opens, found = Opens(), {}

    def since() -> list[str]:
        names, opens.names = sorted(set(opens.names)), []
        return names

    save(context, root, rows, False)
    found["save"] = since()
    step = StepStore(root).path(1)
    for what, columns in (("rows", False), ("columns", True)):
        wanted = shards_of(context.rank, context.world_size, rows, columns=columns)
        shards = {
            name: LocalShard(torch.zeros_like(s.data), torch.zeros_like(s.data), s.start, s.shape, True, s.box)
            for name, s in wanted.items()
        }
        with open_checkpoint(step) as index:
            load_shards(index, shards)
        assert all(torch.equal(shards[name].data, wanted[name].data) for name in SHAPES)
        found[what] = since()
    check_content(step, context.rank, context.world_size)
    found["check"] = since()
    return found


def test_a_rank_opens_the_files_that_it_needs(tmp_path: Path) -> None:
    found = on_ranks(4, resume, tmp_path)
    assert [rank["rows"] for rank in found] == [["00000"], ["00001"], ["00002"], ["00003"]]
    assert [rank["columns"] for rank in found] == [["00000", "00001", "00002", "00003"]] * 4
    for number, rank in enumerate(found):  # of 2.4 MB a rank, some chunks end in the file of the next one
        assert set(rank["save"]) <= {f"{number:05d}", f"{number + 1:05d}"}
        # Rank 0 also checks the small tensors, of which each rank has a part.
        assert number == 0 or set(rank["check"]) <= {f"{number + beside:05d}" for beside in (-1, 0, 1)}


def load_column_of_columns(context: DistributedContext, root: Path) -> list[str]:
    save(context, root, rows, True)
    opens = Opens()
    wanted = shards_of(context.rank, context.world_size, rows, columns=True)["a.weight"]
    part = LocalShard(
        torch.zeros_like(wanted.data), torch.zeros_like(wanted.data), wanted.start, wanted.shape, True, wanted.box
    )
    with open_checkpoint(StepStore(root).path(1)) as index:
        load_shards(index, {"a.weight": part})
    assert torch.equal(part.data, wanted.data)
    return sorted(set(opens.names))


def test_columns_are_read_from_the_files_that_have_them(tmp_path: Path) -> None:
    assert on_ranks(2, load_column_of_columns, tmp_path) == [["00000"], ["00001"]]


class Frugal(DistributedContext):
    """Ranks that refuse what each of them would receive from all others."""

    def all_gather_object(self, value: Any) -> list[Any]:
        raise AssertionError("a save that succeeds has no all-gather of objects")


def save_frugally(context: DistributedContext, root: Path) -> None:
    save(Frugal(**{name: getattr(context, name) for name in context.__dataclass_fields__}), root, rows, False)


def test_no_rank_receives_what_all_others_hold(tmp_path: Path) -> None:
    on_ranks(3, save_frugally, tmp_path)
    assert verify(StepStore(tmp_path).path(1)).is_sound


def swap_offsets(document: dict[str, Any]) -> None:
    """Two tensors of one size, each where the other lies: it contradicts nothing but the headers."""
    names = list(document["tensors"])
    a, b = names.index("b.weight"), names.index("c.weight")
    for layout in document["layouts"]:
        pairs = dict(map(tuple, layout))
        if a in pairs:
            pairs[a], pairs[b] = pairs[b], pairs[a]
            layout[:] = [list(pair) for pair in pairs.items()]


@pytest.mark.parametrize(
    "lie",
    [
        swap_offsets,
        lambda document: document["tensors"]["b.weight"].__setitem__(0, "I32"),
        lambda document: document.update(step=7),
        lambda document: [d.update(shape=[50, 6]) for d in document["divisions"] if d["shape"] == [6, 50]] and None,
    ],
    ids=["offsets", "dtype", "step", "shape"],
)
def test_a_lie_that_contradicts_nothing_is_found_by_verify(
    lie: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "c.weight", (6, 50))
    step = saved(tmp_path, 2)
    seal(step, lie, SHARD_INDEX)
    with pytest.raises(CheckpointError, match=f"{SHARD_INDEX} is not what was written"):
        open_checkpoint(step)
    (step / MANIFEST).unlink()
    open_checkpoint(step).close()
    assert any(SHARD_INDEX in problem.message for problem in verify(step).problems)


Document = dict[str, Any]


def edit_header(path: Path, change: Callable[[Document, Document], object]) -> None:
    """Change a header and our entry in its metadata, and let it have as many bytes as before."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    document = json.loads(content[8 : 8 + length])
    info = json.loads(document["__metadata__"][SHARD_KEY])
    change(document, info)
    document["__metadata__"][SHARD_KEY] = json.dumps(info, separators=(",", ":"))
    header = json.dumps(document, separators=(",", ":")).encode()
    assert len(header) <= length
    path.write_bytes(content[:8] + header.ljust(length) + content[8 + length :])


def swap(one: Document, two: Document, key: str) -> None:
    one[key], two[key] = two[key], one[key]


B, C = "b.weight.exp_avg", "c.weight.exp_avg"


@pytest.mark.parametrize(
    "change",
    [
        lambda header, info: swap(header[B], header[C], "data_offsets"),
        lambda header, info: header[B].update(dtype="I32"),
        lambda header, info: header[B].update(shape=[50, 3]),
        lambda header, info: (header.pop(B), info["tensors"].pop(B)),
        lambda header, info: info["tensors"][B].update(start=50),
        lambda header, info: info["tensors"][B].update(shape=[50, 6]),
        lambda header, info: info.update(rank=1),
        lambda header, info: info.update(world_size=3),
        lambda header, info: info.update(step=2),
        lambda header, info: info.update(save=info["save"][::-1]),
        lambda header, info: info.update(format_version=2),
    ],
)
def test_a_header_that_the_index_does_not_describe_is_found_by_verify(
    change: Callable[[Document, Document], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a file of optimizer state, which nothing else than the manifest compares."""
    monkeypatch.setitem(SHAPES, "c.weight", (6, 50))
    step = saved(tmp_path, 2)
    (step / MANIFEST).unlink()
    folder = step / "optimizer"
    edit_header(folder / "shard-00000-of-00002.safetensors", lambda header, info: None)
    assert has_described_headers(folder, read_shard_index(folder)), "spaces say nothing"
    edit_header(folder / "shard-00000-of-00002.safetensors", change)
    assert not has_described_headers(folder, read_shard_index(folder))
    open_checkpoint(step).close()
    assert verify(step).problems


@pytest.mark.parametrize("change", [{"offsets": [0, 1]}, {"shape": [6, 49]}])
def test_a_box_that_the_index_does_not_describe_is_found(change: Document, tmp_path: Path) -> None:
    step = saved(tmp_path, 2, columns=True)
    assert has_described_headers(step, read_shard_index(step))
    edit_header(
        step / "shard-00000-of-00002.safetensors", lambda header, info: info["tensors"]["b.weight"].update(change)
    )
    assert not has_described_headers(step, read_shard_index(step))


def test_a_planted_index_is_refused(tmp_path: Path) -> None:
    step = saved(tmp_path, 2)
    seal(step, lambda document: document["files"].pop(SHARD_INDEX) and None)
    with pytest.raises(CheckpointError, match=f"{SHARD_INDEX} is not what was written"):
        open_checkpoint(step)


def test_files_that_the_index_was_not_made_of_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    step = saved(tmp_path, 2)
    one, two = sorted(step.glob("shard-*"))
    os.rename(one, tmp_path / "x")
    os.rename(two, one)
    os.rename(tmp_path / "x", two)
    with open_checkpoint(step) as index, pytest.raises(CheckpointError, match="of another save"):
        index.read("a.weight")
    os.truncate(one, one.stat().st_size - 1)
    with open_checkpoint(step) as index, pytest.raises(CheckpointError, match="truncated"):
        index.read("a.weight")
    one.unlink()
    with pytest.raises(CheckpointError, match="the file of rank 0 is missing"):
        open_checkpoint(step)


def test_ragged_ranges_are_more_than_one_piece() -> None:
    edges = [ragged((6, 50), rank, 4) for rank in range(4)]
    assert all(one[0] + one[1] == two[0] for one, two in pairwise(edges))
    assert any(start % 50 for start, _ in edges)


def test_ranks_that_hold_alike_report_alike() -> None:
    """So what rank 0 reads for the index of a thousand ranks is what a few of them say."""
    specs = [TensorSpec("embed", "BF16", (1000, 8)), TensorSpec("norm", "F32", (90,)), TensorSpec("one", "F32", ())]
    parts = {spec.name: chunk_rows(spec, 64) for spec in specs}
    reports = []
    for rank in range(64):
        pieces = [(spec, *parts[spec.name][rank]) for spec in specs]
        file = plan_sharded(pieces, rank, 64, step=1, save_id="s", aliases={})
        reports.append(RankFileSummary.of(file, pieces))
    assert len({report.content for report in reports}) == 4, "with the scalar, both, embed alone, nothing"
    assert len({str(report.parts) for report in reports}) > 60
    assert all(len(report.content) < 200 for report in reports)
