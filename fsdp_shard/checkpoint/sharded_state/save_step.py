"""Writes a run's state to a step directory with all ranks, each only its own ranges (`write_shards`).

A save plans, creates the files, writes and hashes, syncs, hashes the chunks that several ranks wrote, and commits. No
rank ever holds more than its part plus a small buffer. All collectives are in `save_step` itself; the phases between
them are local, and fault points name the moments in between. A rank's traffic does not grow with the number of ranks,
except on rank 0, which makes the index of rank files and the manifest from the other ranks' reports.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.checkpoint.digests import complete_chunk_digests, record_tensor
from fsdp_shard.checkpoint.io import fault_point
from fsdp_shard.checkpoint.sharded_state import write_plan, write_shards
from fsdp_shard.checkpoint.steps.file_plan import SINGLE_FILE
from fsdp_shard.checkpoint.steps.manifest import Manifest, TensorRecord
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, RankFileSummary, build_shard_index
from fsdp_shard.checkpoint.steps.step_store import AVERAGE, OPTIMIZER, StepStore
from fsdp_shard.distributed import Communicator, LocalShard, run_on_all, run_on_main
from fsdp_shard.errors import FsdpShardError


class Folder(NamedTuple):
    """Shards that are a set of rank files in a folder of the step, and which of their names are tied."""

    name: str
    shards: Mapping[str, LocalShard]
    aliases: Mapping[str, str]


class PlannedRank(NamedTuple):
    """What one rank is about to write: its bytes, and its report of each rank file by folder, "" for the weights."""

    num_bytes: int
    reports: dict[str, RankFileSummary]


@dataclass(frozen=True)
class StepContent:
    """The content of a step directory. `model_files` (config, tokenizer, trainer state) are needed on rank 0 only.

    `average` holds averages of the weights, a second set of rank files in a folder of the step. `single_file` is the
    name of the weight file if the layout has only one. Shards are read through `reading`.
    """

    weights: Mapping[str, LocalShard]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, LocalShard] = field(default_factory=dict)
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    single_file: str = SINGLE_FILE
    average: Mapping[str, LocalShard] = field(default_factory=dict)
    reading: write_shards.Reading = write_shards.read_shard

    @property
    def folders(self) -> tuple[Folder, ...]:
        """What is written in addition to the weights, as rank files whatever their layout."""
        return Folder(OPTIMIZER, self.optimizer, {}), Folder(AVERAGE, self.average, self.aliases)


def save_step(
    ranks: Communicator,
    store: StepStore,
    step: int,
    content: StepContent,
    *,
    layout: str,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write `content` as step `step` of `store` and commit it; a collective.

    Args:
        ranks: The ranks that save.
        store: The checkpoints of the run; rank 0's counts.
        step: The step, which must not exist yet.
        content: This rank's part of the step.
        layout: `gathered` or `sharded`, of the weights; optimizer state and averages are always sharded.
        max_shard_bytes: Largest file of gathered weights; None for one file. A rank file is never divided.

    Returns:
        The step directory, the same on every rank.

    Raises:
        StorageError: A disk is full or fails, on any rank.
        SaveError: The step exists already. In both cases earlier steps are kept, and nothing of this one.
    """
    root, save_id = ranks.broadcast_object((str(store.root), uuid.uuid4().hex))
    store = StepStore(Path(root))
    target = write_plan.Target(
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=step,
        save_id=save_id,
        max_shard_bytes=max_shard_bytes,
        aliases=content.aliases,
        single_file=content.single_file,
    )
    is_used = ranks.all_reduce([float(bool(one.shards)) for one in content.folders], "max")  # a rank may hold none
    folders = [one for one, flag in zip(content.folders, is_used, strict=True) if flag > 0]
    plans = _plan(content, folders, target, layout)
    planned = ranks.gather_object(PlannedRank(plans.num_bytes, plans.reports))
    indexes = run_on_all(ranks, lambda: _indexes(content, target, planned))  # none but on rank 0
    plans = plans._replace(weights=plans.weights.with_files(indexes))
    num_bytes = sum(one.num_bytes for one in planned) + sum(map(len, indexes.values()))
    directory = Path(run_on_main(ranks, lambda: _begin(store, step, num_bytes)))
    others, reading = {one.name: one.shards for one in folders}, content.reading
    try:
        run_on_all(ranks, lambda: write_shards.create_files(directory, plans))
        written = run_on_all(
            ranks, lambda: write_shards.write_ranges(directory, plans, content.weights, others, reading)
        )
        run_on_all(ranks, lambda: write_shards.hash_shared_chunks(directory, plans.weights, content.weights, written))
        everyone = ranks.gather_object(written.without_empty())
        manifest = _manifest(ranks, step, content, layout, everyone)
        run_on_main(ranks, lambda: _commit(store, directory, step, manifest))
    except FsdpShardError:  # on all ranks: all have finished writing
        if ranks.is_main:
            store.discard(step)
        raise
    return store.path(step)


def _plan(
    content: StepContent, folders: Sequence[Folder], target: write_plan.Target, layout: str
) -> write_shards.RankPlans:
    """Plan this rank's writes; `folders` are those of which any rank holds something."""
    weights = write_plan.LAYOUTS[layout](content.weights, target)
    if target.rank == 0:
        weights = weights.with_files(content.model_files)
    others = {
        one.name: write_plan.plan_folder_writes(one.name, one.shards, replace(target, aliases=one.aliases))
        for one in folders
    }
    return write_shards.RankPlans(weights, others)


def _manifest(
    ranks: Communicator,
    step: int,
    content: StepContent,
    layout: str,
    everyone: Sequence[write_shards.WrittenShards],
) -> Manifest:
    """Return the manifest, complete on rank 0 only."""
    return Manifest(
        layout=layout,
        step=step,
        world_size=ranks.world_size if layout == "sharded" else 1,
        mesh=ranks.mesh_shape,
        files={name: record for one in everyone for name, record in sorted(one.records.items())},
        tensors=_tensor_records(content.weights, everyone) if ranks.is_main else {},
        aliases=dict(content.aliases),
    )


def _begin(store: StepStore, step: int, num_bytes: int) -> str:
    directory = store.begin(step, num_bytes)
    fault_point("begun")
    return str(directory)


def _commit(store: StepStore, directory: Path, step: int, manifest: Manifest) -> None:
    store.commit(directory, step, manifest)
    store.set_latest(step)
    fault_point("pointed")


def _indexes(content: StepContent, target: write_plan.Target, planned: Sequence[PlannedRank]) -> dict[str, bytes]:
    """Return the indexes of the reported rank files (of the weights, of each folder), by file name."""
    found = {}
    for folder in (Folder("", content.weights, content.aliases), *content.folders):
        reports = [one.reports[folder.name] for one in planned if folder.name in one.reports]
        if reports:
            name = f"{folder.name}/{SHARD_INDEX}" if folder.name else SHARD_INDEX
            assert len(reports) == len(planned), f"only some ranks have a file of those that {name} lists"
            found[name] = build_shard_index(reports, target.step, target.save_id, folder.aliases)
    return found


def _tensor_records(
    shards: Mapping[str, LocalShard], everyone: Sequence[write_shards.WrittenShards]
) -> dict[str, TensorRecord]:
    chunks: dict[str, dict[int, bytes]] = {name: {} for name in shards}
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for written in everyone:
        for name, found in written.digests.items():
            chunks[name].update(found)
        for name, part in written.parts.items():
            parts.setdefault(name, []).append(part)
    for name, of_ranks in parts.items():
        whole = memoryview(b"".join(content for _, content in sorted(of_ranks)))
        chunks[name] = complete_chunk_digests(whole, 0, write_plan.spec_of(name, shards[name]).num_bytes)
    return {name: record_tensor(write_plan.spec_of(name, shard), chunks[name]) for name, shard in shards.items()}
