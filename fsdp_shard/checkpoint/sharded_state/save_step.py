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
from typing import cast

from fsdp_shard.checkpoint.digests import complete_chunk_digests, record_tensor
from fsdp_shard.checkpoint.io import fault_point
from fsdp_shard.checkpoint.sharded_state import write_plan, write_shards
from fsdp_shard.checkpoint.steps.file_plan import SINGLE_FILE
from fsdp_shard.checkpoint.steps.manifest import Manifest, TensorRecord
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, RankReport, build_shard_index
from fsdp_shard.checkpoint.steps.step_store import AVERAGE, OPTIMIZER, StepStore
from fsdp_shard.distributed import Communicator, LocalShard, run_on_all, run_on_main
from fsdp_shard.errors import FsdpShardError


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


def save_step(
    ranks: Communicator,
    store: StepStore,
    step: int,
    state: StepContent,
    *,
    layout: str,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write `state` as step `step` of `store` and commit it; a collective.

    Args:
        ranks: The ranks that save.
        store: The checkpoints of the run; rank 0's counts.
        step: The step, which must not exist yet.
        state: This rank's part of the state.
        layout: `gathered` or `sharded`, of the weights; optimizer state and averages are always sharded.
        max_shard_bytes: Largest file of gathered weights; None for one file. A rank file is never divided.

    Returns:
        The step directory, the same on every rank.

    Raises:
        StorageError: A disk is full or fails, on any rank.
        SaveError: The step exists already. In both cases earlier steps are kept, and nothing of this one.
    """
    root, save = ranks.broadcast_object((str(store.root), uuid.uuid4().hex))
    store = StepStore(Path(root))
    who = (ranks.rank, ranks.world_size, step, save)
    target = write_plan.Target(*who, max_shard_bytes, state.aliases, state.single_file)
    # A rank may hold none of them.
    has_folder = ranks.all_reduce([float(bool(part)) for part in (state.optimizer, state.average)], "max")
    plans = _plan(state, target, layout, [flag > 0 for flag in has_folder])
    own_bytes = sum(plan.num_bytes for plan in plans)
    planned = ranks.gather_object((own_bytes, *(plan.report for plan in plans)))
    indexes = run_on_all(ranks, lambda: _indexes(target, planned))  # none but on rank 0
    plans = plans._replace(weights=plans.weights.with_files(indexes))
    num_bytes = sum(size for size, *_ in planned) + sum(map(len, indexes.values()))
    directory = Path(run_on_main(ranks, lambda: _begin(store, step, num_bytes)))
    parts = (state.weights, (state.optimizer, state.average), state.reading)
    try:
        run_on_all(ranks, lambda: write_shards.create_files(directory, plans))
        written = run_on_all(ranks, lambda: write_shards.write_ranges(directory, plans, *parts))
        run_on_all(ranks, lambda: write_shards.hash_shared_chunks(directory, plans.weights, state.weights, written))
        everyone = ranks.gather_object(written.without_empty())
        manifest = Manifest(
            layout=layout,
            step=step,
            world_size=ranks.world_size if layout == "sharded" else 1,
            mesh=ranks.mesh_shape,
            files={name: record for one in everyone for name, record in sorted(one.records.items())},
            tensors=_tensor_records(state.weights, everyone) if ranks.is_main else {},
            aliases=dict(state.aliases),
        )
        run_on_main(ranks, lambda: _commit(store, directory, step, manifest))
    except FsdpShardError:  # on all ranks: all have finished writing
        if ranks.is_main:
            store.discard(step)
        raise
    return store.path(step)


def _plan(
    state: StepContent, target: write_plan.Target, layout: str, has_folder: Sequence[bool]
) -> write_shards.RankPlans:
    """Plan this rank's writes. `has_folder`: whether any rank has optimizer state, and averages."""
    weights, others = write_plan.LAYOUTS[layout](state.weights, target), []
    folders = ((OPTIMIZER, state.optimizer, dict[str, str]()), (AVERAGE, state.average, target.aliases))
    for is_there, (folder, shards, aliases) in zip(has_folder, folders, strict=True):
        plan = write_plan.plan_folder_writes(folder, shards, replace(target, aliases=aliases)) if is_there else None
        others.append(plan or write_plan.WritePlan([], {}))
    if target.rank == 0:
        weights = weights.with_files(state.model_files)
    return write_shards.RankPlans(weights, *others)


def _begin(store: StepStore, step: int, num_bytes: int) -> str:
    directory = store.begin(step, num_bytes)
    fault_point("begun")
    return str(directory)


def _commit(store: StepStore, directory: Path, step: int, manifest: Manifest) -> None:
    store.commit(directory, step, manifest)
    store.set_latest(step)
    fault_point("pointed")


def _indexes(
    target: write_plan.Target, planned: Sequence[tuple[int, RankReport | None, RankReport | None, RankReport | None]]
) -> dict[str, bytes]:
    """Return the indexes of the reported rank files (weights, optimizer state, averages), by file name."""
    found = {}
    for number, (folder, aliases) in enumerate(
        (("", target.aliases), (f"{OPTIMIZER}/", dict[str, str]()), (f"{AVERAGE}/", target.aliases)), start=1
    ):
        name, reports = f"{folder}{SHARD_INDEX}", [cast("RankReport | None", one[number]) for one in planned]
        known = [report for report in reports if report is not None]
        if known:
            assert len(known) == len(reports), f"only some ranks have a file of those that {name} lists"
            found[name] = build_shard_index(known, target.step, target.save, aliases)
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
