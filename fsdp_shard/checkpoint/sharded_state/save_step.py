"""A run's state into a step directory, over all ranks: each writes its own ranges only (`ranges`).

Saving: plan, create the files, write and hash, sync, finish the hash chunks that two ranks share, commit. No
rank ever holds more than its part plus a small buffer. Collectives are the calls on `context`, all at the top level of
`save_step`; every phase between them is local, and `points` names the moments in between. Knows no wrapper, no data and
no loop, nor whether it runs behind one (`staging`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.digests import num_chunks, tensor_digest
from fsdp_shard.checkpoint.io.fault_points import fault_point
from fsdp_shard.checkpoint.io.files import member, read_json
from fsdp_shard.checkpoint.sharded_state.write_plan import LAYOUTS, Target, WritePlan, plan_sharded_writes, spec_of
from fsdp_shard.checkpoint.sharded_state.write_shards import (
    Digests,
    RankPlans,
    Reading,
    Records,
    create_files,
    hash_shared_chunks,
    read_shard,
    unaligned_ranges,
    write_ranges,
)
from fsdp_shard.checkpoint.steps.file_plan import SINGLE_FILE
from fsdp_shard.checkpoint.steps.manifest import Manifest, TensorRecord
from fsdp_shard.checkpoint.steps.step_store import Store
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import FsdpShardError

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext

TRAINER = "trainer.json"


@dataclass(frozen=True)
class RunState:
    """All that a step directory holds. `side_files` (config, tokenizer) are needed on rank 0 only.

    `single_file` is the name of the weights' file where the layout makes one. Shards are read through `reading`.
    """

    weights: Mapping[str, LocalShard]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, LocalShard] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    single_file: str = SINGLE_FILE
    reading: Reading = read_shard


def save_step(
    context: DistributedContext,
    store: Store,
    step: int,
    state: RunState,
    *,
    layout: str,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write `state` as step `step` of `store` and commit it; every rank returns the same directory or raises the same.

    A SaveError leaves the earlier steps as they were, and nothing of this one; a StorageError is the disk's fault.
    """
    root, save = context.broadcast_object((str(store.root), uuid.uuid4().hex))
    store = Store(Path(root))
    target = Target(context.rank, context.world_size, step, save, max_shard_bytes, state.aliases, state.single_file)
    keeps_states = any(context.all_gather_object(bool(state.optimizer)))  # one rank may have nothing of it
    states = _plan_optimizer(state, target) if keeps_states else WritePlan([], {})
    plans = RankPlans(LAYOUTS[layout](state.weights, target), states, _small_files(state, target))
    planned = context.all_gather_object((plans.num_bytes, unaligned_ranges(plans.weights, state.weights)))
    num_bytes, ranges = sum(size for size, _ in planned), [theirs for _, theirs in planned]
    directory = Path(context.broadcast_object(context.together(lambda: _begin(context, store, step, num_bytes))))
    parts = (state.weights, state.optimizer, state.reading)
    try:
        context.together(lambda: create_files(directory, plans))
        hashers, records = context.together(lambda: write_ranges(directory, plans, *parts))
        digests = context.together(lambda: hash_shared_chunks(directory, state.weights, hashers, ranges))
        everyone = context.gather_object((digests, records))
        context.together(lambda: _commit(context, store, directory, step, state, layout, everyone))
    except FsdpShardError:  # on all ranks: none writes any more
        if context.is_main:
            store.discard(step)
        raise
    return store.path(step)


def step_trainer(directory: Path) -> Any:
    """The parsed trainer.json of a step directory."""
    return read_json(member(directory, TRAINER))


def _plan_optimizer(state: RunState, target: Target) -> WritePlan:
    return plan_sharded_writes(state.optimizer, replace(target, aliases={}))


def _small_files(state: RunState, target: Target) -> dict[str, bytes]:
    if target.rank != 0:
        return {}
    return {**state.side_files, TRAINER: (json.dumps(dict(state.trainer), indent=2) + "\n").encode()}


def _begin(context: DistributedContext, store: Store, step: int, num_bytes: int) -> str:
    if not context.is_main:
        return ""
    directory = store.begin(step, num_bytes)
    fault_point("begun")
    return str(directory)


def _commit(
    context: DistributedContext,
    store: Store,
    directory: Path,
    step: int,
    state: RunState,
    layout: str,
    everyone: list[tuple[Digests, Records]],
) -> None:
    if not context.is_main:
        return
    manifest = Manifest(
        layout=layout,
        step=step,
        world_size=context.world_size if layout == "sharded" else 1,
        mesh={str(name): context.mesh.size(dim) for dim, name in enumerate(context.mesh.mesh_dim_names or ())},
        files={name: record for _, records in everyone for name, record in sorted(records.items())},
        tensors=_tensor_records(state.weights, [digests for digests, _ in everyone]),
        aliases=dict(state.aliases),
    )
    store.commit(directory, step, manifest)
    store.set_latest(step)
    fault_point("pointed")


def _tensor_records(shards: Mapping[str, LocalShard], everyone: list[Digests]) -> dict[str, TensorRecord]:
    records = {}
    for name, shard in shards.items():
        spec = spec_of(name, shard)
        chunks: dict[int, bytes] = {}
        for digests in everyone:
            chunks.update(digests.get(name, {}))
        assert sorted(chunks) == list(range(num_chunks(spec.num_bytes))), f"chunks of {name} are missing"
        ordered = [chunks[number] for number in sorted(chunks)]
        digest = tensor_digest(spec.dtype, spec.shape, ordered)
        records[name] = TensorRecord(spec.dtype, spec.shape, digest, tuple(chunk.hex() for chunk in ordered))
    return records
