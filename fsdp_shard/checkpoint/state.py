"""A run's state in and out of a step directory, over all ranks: each rank reads and writes its own ranges only.

Saving: plan, create the files, write and hash, sync, read back the hash chunks that two ranks share, commit. No
rank ever holds more than its part plus a small buffer. Collectives are the calls on `context`, all at the top level of
`save_step`; every phase between them is local. Knows no wrapper, no data and no loop.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint import dtypes
from fsdp_shard.checkpoint.files import pwrite_all
from fsdp_shard.checkpoint.index import TensorIndex, open_checkpoint, tensor_bytes
from fsdp_shard.checkpoint.integrity import (
    CHUNK_BYTES,
    RangeHasher,
    chunk_digest,
    digest_chunks,
    num_chunks,
    record_file,
    tensor_digest,
)
from fsdp_shard.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from fsdp_shard.checkpoint.store import Store, fsync_file
from fsdp_shard.checkpoint.transfer import create_file
from fsdp_shard.checkpoint.writes import LAYOUTS, Target, WritePlan, plan_sharded_writes, spec_of
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch

    from fsdp_shard.distributed import DistributedContext

OPTIMIZER = "optimizer"
TRAINER = "trainer.json"
_STAGE_BYTES = 16 << 20  # moved between device, hash and file at a time

Digests = dict[str, dict[int, bytes]]  # tensor -> {chunk number: digest}
Records = dict[str, FileRecord]  # file -> size and digest


@dataclass(frozen=True)
class RunState:
    """All that a step directory holds. `side_files` (config, tokenizer) are needed on rank 0 only."""

    weights: Mapping[str, LocalShard]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, LocalShard] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)


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

    A SaveError leaves the earlier steps as they were.
    """
    root, save = context.broadcast_object((str(store.root), uuid.uuid4().hex))
    store = Store(Path(root))
    directory = Path(context.broadcast_object(context.together(lambda: _begin(context, store, step))))
    target = Target(context.rank, context.world_size, step, save, max_shard_bytes, state.aliases)
    plan = LAYOUTS[layout](state.weights, target)
    context.together(lambda: _create(directory, plan))
    digests = context.together(lambda: _write_tensors(directory, plan, state.weights))
    records = context.together(lambda: _write_beside(directory, state, plan, target))
    context.together(lambda: _hash_shared_chunks(directory, state.weights, digests))
    everyone = context.gather_object((digests, records))
    context.together(lambda: _commit(context, store, directory, step, state, layout, everyone))
    return store.path(step)


def load_shards(index: TensorIndex, shards: Mapping[str, LocalShard], names: Mapping[str, str] | None = None) -> None:
    """Fill each shard's own memory with its range, cast where the dtypes differ; touches nothing else of the files.

    `names` maps a shard's name to the one in `index`, where they differ.
    """
    for name, shard in shards.items():
        stored = names[name] if names is not None else name
        assert index.entry(stored).shape == shard.shape, name
        _load_range(index, stored, shard)


def step_trainer(directory: Path) -> Any:
    """The parsed trainer.json of a step directory."""
    from fsdp_shard.checkpoint.files import member, read_json

    return read_json(member(directory, TRAINER))


def _begin(context: DistributedContext, store: Store, step: int) -> str:
    return str(store.begin(step)) if context.is_main else ""


def _create(directory: Path, plan: WritePlan) -> None:
    for file in plan.creates:
        create_file(directory, file)


def _write_tensors(directory: Path, plan: WritePlan, shards: Mapping[str, LocalShard]) -> Digests:
    """Put this rank's elements in their places and on the disk; returns the digests of the chunks that lie in them."""
    digests: Digests = {}
    files = {file for file, _ in plan.places.values()} | {file.name for file in plan.creates}
    descriptors = {name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC) for name in sorted(files)}
    try:
        for name, (file, offset) in plan.places.items():
            hasher = _hasher(name, shards[name])
            for position, data in _staged(shards[name].data):
                hasher.update(data)
                pwrite_all(descriptors[file], offset + position, data)
            digests[name] = hasher.digests
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return digests


def _write_beside(directory: Path, state: RunState, plan: WritePlan, target: Target) -> Records:
    """This rank's optimizer file and the small files; returns the records of every file that this rank made."""
    records = {
        file.name: FileRecord(file.num_bytes, header_digest=chunk_digest(file.header).hex()) for file in plan.creates
    }
    small = dict(plan.small_files)
    if target.rank == 0:
        small |= {**state.side_files, TRAINER: (json.dumps(dict(state.trainer), indent=2) + "\n").encode()}
    for name, content in small.items():
        _write_small(directory / name, content)
        records[name] = FileRecord(len(content), digest=chunk_digest(content).hex())
    if state.optimizer:
        (directory / OPTIMIZER).mkdir(exist_ok=True)
        states = plan_sharded_writes(state.optimizer, replace(target, aliases={}))
        _create(directory / OPTIMIZER, states)
        _write_tensors(directory / OPTIMIZER, states, state.optimizer)
        records |= {
            f"{OPTIMIZER}/{file.name}": record_file(directory / OPTIMIZER / file.name) for file in states.creates
        }
    return records


def _hash_shared_chunks(directory: Path, shards: Mapping[str, LocalShard], digests: Digests) -> None:
    """Hash the chunks that begin in this rank's range and end in another's, as they lie on the disk."""
    with open_checkpoint(directory) as index:
        for name in digests:
            shard = shards[name]
            start = shard.start * shard.data.element_size()
            mine = [chunk for chunk in _hasher(name, shard).missing if chunk * CHUNK_BYTES >= start]
            digests[name].update(zip(mine, digest_chunks(index, name, mine), strict=True))


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


def _hasher(name: str, shard: LocalShard) -> RangeHasher:
    size = shard.data.element_size()
    total = spec_of(name, shard).num_bytes
    return RangeHasher(total, shard.start * size, (shard.start + len(shard.data)) * size)


def _staged(data: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """(byte position, bytes) of a flat tensor, some MiB at a time; on a GPU each part is copied to the host first."""
    per_stage = max(1, _STAGE_BYTES // data.element_size())
    for start in range(0, len(data), per_stage):
        part = data[start : start + per_stage].cpu()
        yield start * data.element_size(), tensor_bytes(part)


def _write_small(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync_file(path)


def _load_range(index: TensorIndex, stored: str, shard: LocalShard) -> None:
    import torch

    dtype = dtypes.to_torch(index.entry(stored).dtype)
    if dtype == shard.data.dtype and shard.data.device.type == "cpu":
        if len(shard.data):
            index.read_into(stored, shard.start, tensor_bytes(shard.data))
        return
    per_stage = _STAGE_BYTES // dtype.itemsize
    stage = torch.empty(min(per_stage, len(shard.data)), dtype=dtype)
    for start in range(0, len(shard.data), per_stage):
        part = stage[: min(per_stage, len(shard.data) - start)]
        index.read_into(stored, shard.start + start, tensor_bytes(part))
        shard.data[start : start + len(part)].copy_(part)
