"""Writes one rank's part of a step: its ranges of files that several ranks fill, hashed on the way.

All of it is local: `save_step` coordinates the ranks.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import xxhash

from fsdp_shard.checkpoint import digests, tensor_slices
from fsdp_shard.checkpoint.digests import CHUNK_BYTES, SMALL_BYTES, num_chunks
from fsdp_shard.checkpoint.formats import native_sharded
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import FilePool, allocate, fault_point, pwrite_all, split_aligned, start_writeback
from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.checkpoint.sharded_state.write_plan import WritePlan, spec_of
from fsdp_shard.checkpoint.steps.file_plan import FilePlan
from fsdp_shard.checkpoint.steps.manifest import FileRecord
from fsdp_shard.checkpoint.steps.shard_index import RankFileSummary
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError, StorageError
from fsdp_shard.utils import name_in_errors, write_file

_STEP_BYTES = 4 << 20  # hashed and written at a time: whole chunks that fit the last-level cache

Digests = dict[str, dict[int, bytes]]  # tensor -> {chunk number: digest}
Records = dict[str, FileRecord]  # file -> size and digest
SmallParts = dict[str, tuple[int, bytes]]  # small tensor -> (first byte, bytes) of a rank's part
# A shard and a range of its bytes -> a context with those bytes, which keeps them from changing.
Reading = Callable[[LocalShard, slice], AbstractContextManager[memoryview]]


class RankPlans(NamedTuple):
    """One rank's plans: weights with all small files of the step, and the rank files of its folders, by folder."""

    weights: WritePlan
    folders: dict[str, WritePlan]

    @property
    def all(self) -> list[WritePlan]:
        """All plans, in the order of writing."""
        return [self.weights, *self.folders.values()]

    @property
    def num_bytes(self) -> int:
        """Size of this rank's files."""
        return sum(plan.num_bytes for plan in self.all)

    @property
    def reports(self) -> dict[str, RankFileSummary]:
        """This rank's report of each rank file for the index of its folder; the folder of the weights is ""."""
        plans = {"": self.weights, **self.folders}
        return {folder: plan.report for folder, plan in plans.items() if plan.report is not None}


class WrittenShards(NamedTuple):
    """The files and digests that one rank wrote.

    Digests of the weight chunks that it holds completely, its parts of small weights that it does not, and records of
    its files.
    """

    digests: Digests
    parts: SmallParts
    records: Records

    def without_empty(self) -> "WrittenShards":
        """Return the part that rank 0 needs, without names of tensors of which this rank has no digest."""
        return self._replace(digests={name: found for name, found in self.digests.items() if found})


def create_files(directory: Path, plans: RankPlans) -> None:
    """Create this rank's files at full size."""
    for file in (file for plan in plans.all for file in plan.creates):
        _make_folder(directory / file.name)
        create_file(directory, file)
    fault_point("created")


def create_file(root: Path, plan: FilePlan) -> None:
    """Create a planned file in `root` at its full size, with all bytes outside tensors."""
    path = root / plan.name
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with name_in_errors(path):
            allocate(handle, plan.num_bytes)
            for position, frame in plan.frames:
                pwrite_all(handle, position, memoryview(frame))
    finally:
        os.close(handle)


def _make_folder(path: Path) -> None:
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # another rank may have just created it


def read_shard(shard: LocalShard, part: slice) -> AbstractContextManager[memoryview]:
    """Read a shard that does not change during the save; a `Reading`."""
    size = shard.data.element_size()
    return nullcontext(tensor_bytes(shard.data[part.start // size : part.stop // size].cpu()))


def write_ranges(
    directory: Path,
    plans: RankPlans,
    weights: Mapping[str, LocalShard],
    others: Mapping[str, Mapping[str, LocalShard]],
    reading: Reading,
) -> WrittenShards:
    """Write and fsync all of this rank's part; each byte is read once, through `reading`.

    Args:
        directory: The step directory, in which `create_files` has run on all ranks.
        plans: What to write.
        weights: This rank's weights.
        others: This rank's shards of each planned folder.
        reading: Provides the bytes of a shard.
    """
    hashed: Digests = {name: {} for name in plans.weights.offsets}
    parts: SmallParts = {}
    records = {file.name: digests.record_plan(file) for file in plans.weights.creates}
    with closing(_Writer(directory, reading)) as writer:
        for name in plans.weights.offsets:
            writer.write(plans.weights, name, weights[name], _chunk_hasher(name, weights[name], hashed[name], parts))
        fault_point("weights-written")
        for folder, plan in plans.folders.items():
            records |= _write_file(writer, plan, others[folder])
        for name, content in plans.weights.small_files.items():
            _make_folder(directory / name)
            write_file(directory / name, content)
            records[name] = FileRecord(len(content), digest=digests.chunk_digest(content).hex())
        fault_point("optimizer-written")
        for plan in plans.all:
            writer.sync({file.name for file in plan.creates} | {file for file, _ in plan.offsets.values()})
    fault_point("synced")
    return WrittenShards(hashed, parts, records)


def _write_file(writer: "_Writer", plan: WritePlan, shards: Mapping[str, LocalShard]) -> Records:
    """Write this rank's file of a plan of rank files, if it has one; return its record."""
    hasher = xxhash.xxh3_128(b"".join(file.header for file in plan.creates))  # at most one: this rank's
    for name in plan.offsets:  # in file order, as the digest covers the whole file
        writer.write(plan, name, shards[name], lambda start, content: hasher.update(content))
    return {file.name: FileRecord(file.num_bytes, digest=hasher.hexdigest()) for file in plan.creates}


def hash_shared_chunks(
    directory: Path, plan: WritePlan, shards: Mapping[str, LocalShard], written: WrittenShards
) -> None:
    """Add the digests of the chunks that start in this rank's part but that it does not hold completely.

    These are read back after all ranks have written, only from the files that hold a part of them.

    Args:
        directory: The step directory, with the index of rank files if there are any.
        plan: The plan of the weights.
        shards: This rank's weights.
        written: What `write_ranges` returned.
    """
    missing = {
        name: numbers
        for name, found in written.digests.items()
        if name not in written.parts
        and (numbers := [number for number in _started_chunks(name, shards[name]) if number not in found])
    }
    if not missing:
        fault_point("hashed")
        return
    try:
        with _written_index(directory, plan, shards, missing) as index:
            for name, numbers in missing.items():
                written.digests[name].update(
                    zip(numbers, digests.read_chunk_digests(index, name, numbers), strict=True)
                )
    except CheckpointError as error:
        raise StorageError(f"What was just written cannot be read back. {error}") from error
    fault_point("hashed")


def _written_index(
    directory: Path, plan: WritePlan, shards: Mapping[str, LocalShard], names: Iterable[str]
) -> TensorIndex:
    """Open the weights of all ranks: those of rank files, or the tensors `names` of gathered ones."""
    if not plan.scatters:
        return native_sharded.read(directory)
    entries = {}
    for name in names:
        (file, offset), spec, shard = plan.offsets[name], spec_of(name, shards[name]), shards[name]
        start = offset - shard.start * shard.data.element_size()
        whole = Piece(file, start, (0,) * len(spec.shape), spec.shape)
        entries[name] = TensorEntry(name, spec.dtype, spec.shape, (whole,))
    return TensorIndex(directory, "step", entries)


def _started_chunks(name: str, shard: LocalShard) -> list[int]:
    """Return the numbers of a tensor's chunks whose first byte is in this rank's part."""
    size, total = shard.data.element_size(), num_chunks(spec_of(name, shard).num_bytes)
    if shard.box is None:
        start = shard.start * size
        return list(range(num_chunks(start), num_chunks(start + shard.data.nbytes)))
    firsts = (number * CHUNK_BYTES // size for number in range(total))
    return [number for number, first in enumerate(firsts) if tensor_slices.contains(shard.shape, *shard.box, first)]


def _chunk_hasher(
    name: str, shard: LocalShard, hashed: dict[int, bytes], parts: SmallParts
) -> Callable[[int, memoryview], None]:
    """Return a function that hashes a shard's bytes as they are written; boxes hold no complete chunks.

    It keeps a part of a small tensor, which is written at once.
    """
    total = spec_of(name, shard).num_bytes

    def hash_chunks(start: int, content: memoryview) -> None:
        if shard.box is None and len(content) < total <= SMALL_BYTES:
            parts[name] = (start, bytes(content))
        elif shard.box is None:
            hashed.update(digests.complete_chunk_digests(content, start, total))

    return hash_chunks


class _Writer:
    """Writes ranges of existing files of `directory`."""

    def __init__(self, directory: Path, reading: Reading) -> None:
        self._directory, self._reading = directory, reading
        self._pool = FilePool(lambda name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC))

    def write(
        self, plan: WritePlan, name: str, shard: LocalShard, hash_bytes: Callable[[int, memoryview], object]
    ) -> None:
        """Write a shard, and pass its bytes to the hasher: (first byte in the tensor, bytes)."""
        file, first = plan.offsets[name][0], shard.start * shard.data.element_size()
        with self._pool.use(file) as handle, name_in_errors(self._directory / file):
            for offset, part in plan.runs(name, shard):
                for start, stop in split_aligned(first + part.start, first + part.stop, _STEP_BYTES):
                    position = offset + start - first - part.start
                    with self._reading(shard, slice(start - first, stop - first)) as content:
                        hash_bytes(start, content)
                        pwrite_all(handle, position, content)
                        start_writeback(handle, position, len(content))

    def sync(self, names: set[str]) -> None:
        """Flush the files `names` to the disk."""
        for name in sorted(names):
            with self._pool.use(name) as handle, name_in_errors(self._directory / name):
                os.fsync(handle)

    def close(self) -> None:
        self._pool.close()
