"""A run's state in and out of a step directory, over all ranks: each rank reads and writes its own ranges only.

Saving: plan, create the files, write and hash, sync, read back the hash chunks that two ranks share, commit. No
rank ever holds more than its part plus a small buffer. Collectives are the calls on `context`, all at the top level of
`save_step`; every phase between them is local, and `points` names the moments in between. Knows no wrapper, no data and
no loop, nor whether it runs behind one (`staging`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from fsdp_shard.checkpoint import atomic, boxes, dtypes
from fsdp_shard.checkpoint.files import pwrite_all
from fsdp_shard.checkpoint.index import TensorIndex, open_checkpoint, tensor_bytes
from fsdp_shard.checkpoint.integrity import (
    CHUNK_BYTES,
    RangeHasher,
    chunk_digest,
    digest_chunks,
    num_chunks,
    tensor_digest,
)
from fsdp_shard.checkpoint.layout import SINGLE_FILE
from fsdp_shard.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from fsdp_shard.checkpoint.points import reach
from fsdp_shard.checkpoint.store import OPTIMIZER, Store
from fsdp_shard.checkpoint.transfer import create_file
from fsdp_shard.checkpoint.writes import LAYOUTS, Target, WritePlan, plan_sharded_writes, spec_of
from fsdp_shard.errors import FsdpShardError
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch

    from fsdp_shard.distributed import DistributedContext

TRAINER = "trainer.json"
_STAGE_BYTES = 16 << 20  # moved between device, hash and file at a time

Digests = dict[str, dict[int, bytes]]  # tensor -> {chunk number: digest}
Records = dict[str, FileRecord]  # file -> size and digest


@dataclass(frozen=True)
class RunState:
    """All that a step directory holds. `side_files` (config, tokenizer) are needed on rank 0 only.

    `single_file` is the name of the weights' file where the layout makes one.
    """

    weights: Mapping[str, LocalShard]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, LocalShard] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    single_file: str = SINGLE_FILE


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
    plans = _Plans(LAYOUTS[layout](state.weights, target), states, _small_files(state, target))
    num_bytes = sum(context.all_gather_object(plans.num_bytes))
    directory = Path(context.broadcast_object(context.together(lambda: _begin(context, store, step, num_bytes))))
    try:
        context.together(lambda: _create(directory, plans))
        digests, records = context.together(lambda: _write(directory, plans, state))
        context.together(lambda: _hash_shared_chunks(directory, state.weights, digests))
        everyone = context.gather_object((digests, records))
        context.together(lambda: _commit(context, store, directory, step, state, layout, everyone))
    except FsdpShardError:  # on all ranks: none writes any more
        if context.is_main:
            store.discard(step)
        raise
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


@dataclass(frozen=True)
class _Plans:
    """What one rank writes: weights, optimizer state (its file lies in `OPTIMIZER`), and small files, by name."""

    weights: WritePlan
    optimizer: WritePlan
    small_files: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Of the files that this rank creates: over all ranks, those of the whole step."""
        files = [*self.weights.creates, *self.optimizer.creates]
        return sum(file.num_bytes for file in files) + sum(map(len, self.small_files.values()))


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
    reach("begun")
    return str(directory)


def _create(directory: Path, plans: _Plans) -> None:
    for file in plans.weights.creates:
        create_file(directory, file)
    if plans.optimizer.creates:
        (directory / OPTIMIZER).mkdir(exist_ok=True)
    for file in plans.optimizer.creates:
        create_file(directory / OPTIMIZER, file)
    reach("created")


def _write(directory: Path, plans: _Plans, state: RunState) -> tuple[Digests, Records]:
    """Put all that is this rank's in its place and on the disk.

    Returns the digests of the weights' chunks that lie wholly in its ranges, and the records of the files it made.
    """
    hashers = {name: _hasher(name, shard) for name in plans.weights.places if not (shard := state.weights[name]).box}
    records = {
        file.name: FileRecord(file.num_bytes, header_digest=chunk_digest(file.header).hex())
        for file in plans.weights.creates
    }
    with _Writer() as writer:
        for name, (file, _) in plans.weights.places.items():
            observe = hashers[name].update if name in hashers else _ignore
            for offset, part in plans.weights.runs(name, state.weights[name]):
                writer.write(directory / file, offset, state.weights[name].data[part], observe)
        reach("weights-written")
        for plan in plans.optimizer.creates:  # this rank's only one, so it is written front to back
            hasher = xxhash.xxh3_128(plan.header)
            for name, (_, offset) in plans.optimizer.places.items():
                writer.write(directory / OPTIMIZER / plan.name, offset, state.optimizer[name].data, hasher.update)
            records[f"{OPTIMIZER}/{plan.name}"] = FileRecord(plan.num_bytes, digest=hasher.hexdigest())
        small_files = {**plans.weights.small_files, **plans.small_files}
        for name, content in small_files.items():
            atomic.write_file(directory / name, content)
            records[name] = FileRecord(len(content), digest=chunk_digest(content).hex())
        reach("optimizer-written")
        writer.sync([directory / plan.name for plan in plans.weights.creates])
        writer.sync([directory / OPTIMIZER / plan.name for plan in plans.optimizer.creates])
    reach("synced")
    return {name: hashers[name].digests if name in hashers else {} for name in plans.weights.places}, records


def _ignore(data: memoryview) -> None:
    """The rows of a box lie in chunks of several ranks: those are hashed when they are on the disk."""


class _Writer:
    """Writes ranges of files that are there already, and has them on the disk when `sync` returns."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def write(self, path: Path, offset: int, data: torch.Tensor, observe: Callable[[memoryview], object]) -> None:
        """The elements of the flat tensor `data` from byte `offset` on; `observe` sees their bytes, in order."""
        descriptor = self._open(path)
        for position, part in _staged(data):
            observe(part)
            with atomic.naming(path):
                pwrite_all(descriptor, offset + position, part)
            atomic.start_writeback(descriptor, offset + position, len(part))

    def sync(self, paths: Iterable[Path]) -> None:
        """Have all that was written, and the files `paths`, on the disk."""
        for path in paths:
            self._open(path)
        for path, descriptor in self._descriptors.items():
            with atomic.naming(path):
                os.fsync(descriptor)

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def _hash_shared_chunks(directory: Path, shards: Mapping[str, LocalShard], digests: Digests) -> None:
    """Hash the chunks that begin in this rank's range and end in another's, as they lie on the disk."""
    with open_checkpoint(directory) as index:
        for name in digests:
            mine = _begins_in(name, shards[name])
            digests[name].update(zip(mine, digest_chunks(index, name, mine), strict=True))
    reach("hashed")


def _begins_in(name: str, shard: LocalShard) -> list[int]:
    """The chunks of a tensor that begin in this rank's part of it and were not hashed as they were written."""
    size = shard.data.element_size()
    if shard.box is None:
        return [chunk for chunk in _hasher(name, shard).missing if chunk * CHUNK_BYTES >= shard.start * size]
    firsts = (number * CHUNK_BYTES // size for number in range(num_chunks(spec_of(name, shard).num_bytes)))
    return [number for number, first in enumerate(firsts) if boxes.contains(shard.shape, *shard.box, first)]


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
    reach("pointed")


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


def _load_range(index: TensorIndex, stored: str, shard: LocalShard) -> None:
    import torch

    if shard.box is not None:
        part = index.read(stored, [slice(at, at + size) for at, size in zip(*shard.box, strict=True)])
        shard.data.copy_(part.reshape(-1))
        return
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
