"""What one rank writes of a step: its ranges of files that several ranks fill, hashed as they are written.

All of it is local: `state` coordinates the ranks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.digests import CHUNK_BYTES, RangeHasher, chunk_digest, digest_chunks, num_chunks
from fsdp_shard.checkpoint.index import tensor_bytes
from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.io.atomicity import allocate, naming
from fsdp_shard.checkpoint.io.fault_points import fault_point
from fsdp_shard.checkpoint.io.files import Handles, page_aligned, pread_into, pwrite_all
from fsdp_shard.checkpoint.open_local import open_local
from fsdp_shard.checkpoint.sharded_state.write_plan import WritePlan, spec_of
from fsdp_shard.checkpoint.steps.file_plan import Extent, FilePlan
from fsdp_shard.checkpoint.steps.manifest import FileRecord
from fsdp_shard.checkpoint.steps.step_store import OPTIMIZER
from fsdp_shard.distributed import LocalShard

_PIECE_BYTES = 4 << 20  # hashed and written at a time: small enough for the last-level cache

Digests = dict[str, dict[int, bytes]]  # tensor -> {chunk number: digest}
Hashers = dict[str, RangeHasher | None]  # tensor -> the hasher of this rank's range; None for a box
Records = dict[str, FileRecord]  # file -> size and digest
UnalignedRanges = dict[str, Extent]  # tensor -> a rank's range of it, if that starts inside a chunk
# A shard and a range of its bytes -> a context that gives those bytes and keeps them from changing.
Reading = Callable[[LocalShard, slice], AbstractContextManager[memoryview]]


@dataclass(frozen=True)
class RankPlans:
    """What one rank writes: weights, optimizer state (its file lies in `OPTIMIZER`), and small files, by name."""

    weights: WritePlan
    optimizer: WritePlan
    small_files: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Of the files that this rank creates: over all ranks, those of the whole step."""
        files = [*self.weights.creates, *self.optimizer.creates]
        return sum(file.num_bytes for file in files) + sum(map(len, self.small_files.values()))


def unaligned_ranges(plan: WritePlan, shards: Mapping[str, LocalShard]) -> UnalignedRanges:
    """This rank's ranges that start inside a chunk: the rank where that chunk starts needs their first bytes."""
    found: UnalignedRanges = {}
    for name, (file, offset) in plan.offsets.items():
        shard = shards[name]
        start = shard.start * shard.data.element_size()
        if shard.box is None and start % CHUNK_BYTES:
            found[name] = Extent(start, start + shard.data.nbytes, file, offset)
    return found


def create_files(directory: Path, plans: RankPlans) -> None:
    for file in plans.weights.creates:
        create_file(directory, file)
    if plans.optimizer.creates:
        (directory / OPTIMIZER).mkdir(exist_ok=True)
    for folder in sorted({Path(name).parent for name in plans.small_files} - {Path()}):
        (directory / folder).mkdir()
    for file in plans.optimizer.creates:
        create_file(directory / OPTIMIZER, file)
    fault_point("created")


def read_shard(shard: LocalShard, part: slice) -> AbstractContextManager[memoryview]:
    """The `Reading` of shards that nothing changes during the save."""
    size = shard.data.element_size()
    return nullcontext(tensor_bytes(shard.data[part.start // size : part.stop // size].cpu()))


def write_ranges(
    directory: Path,
    plans: RankPlans,
    weights: Mapping[str, LocalShard],
    optimizer: Mapping[str, LocalShard],
    reading: Reading,
) -> tuple[Hashers, Records]:
    """Write and fsync everything that this rank writes; each byte is read once, through `reading`.

    Returns:
        The hashers of the weights, by name, and the records of the files that this rank made.
    """
    hashers = {name: _hasher(name, weights[name]) for name in plans.weights.offsets}
    records = {
        file.name: FileRecord(file.num_bytes, header_digest=chunk_digest(file.header).hex())
        for file in plans.weights.creates
    }
    with closing(_Writer(directory, reading)) as writer:
        for name, (file, _) in plans.weights.offsets.items():
            for offset, part in plans.weights.runs(name, weights[name]):
                writer.write(file, offset, weights[name], part, hashers[name])
        fault_point("weights-written")
        for plan in plans.optimizer.creates:  # at most one: this rank's
            hasher = xxhash.xxh3_128(plan.header)  # of the whole file, so it is written front to back
            for name, (_, offset) in plans.optimizer.offsets.items():
                shard = optimizer[name]
                writer.write(f"{OPTIMIZER}/{plan.name}", offset, shard, slice(0, shard.data.nbytes), hasher)
            records[f"{OPTIMIZER}/{plan.name}"] = FileRecord(plan.num_bytes, digest=hasher.hexdigest())
        small_files = {**plans.weights.small_files, **plans.small_files}
        for name, content in small_files.items():
            atomicity.write_file(directory / name, content)
            records[name] = FileRecord(len(content), digest=chunk_digest(content).hex())
        fault_point("optimizer-written")
        created = {plan.name for plan in plans.weights.creates}
        writer.sync(sorted(created | {file for file, _ in plans.weights.offsets.values()}))
        writer.sync(f"{OPTIMIZER}/{plan.name}" for plan in plans.optimizer.creates)
    fault_point("synced")
    return hashers, records


def hash_shared_chunks(
    directory: Path, shards: Mapping[str, LocalShard], hashers: Hashers, ranges: Sequence[UnalignedRanges]
) -> Digests:
    """The digests of all chunks that start in this rank's part; bytes that other ranks wrote are read from the disk.

    Args:
        directory: The step directory, in which all ranks have written their ranges.
        shards: This rank's weights.
        hashers: What `write_ranges` returned.
        ranges: The unaligned ranges of every rank.
    """
    digests: Digests = {}
    buffer = page_aligned(CHUNK_BYTES)
    with closing(Handles(lambda name: os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC))) as handles:
        for name, hasher in hashers.items():
            if hasher is None:
                continue
            for piece in _pieces(hasher.rest, [theirs[name] for theirs in ranges if name in theirs]):
                content = buffer[: piece.stop - piece.start]
                with handles.use(piece.file) as handle, atomicity.naming(directory / piece.file):
                    if pread_into(handle, piece.offset, content) < len(content):
                        raise OSError(errno.EIO, "the file is shorter than what was written to it")
                hasher.finish(content)
            digests[name] = hasher.digests
    if boxed := [name for name, hasher in hashers.items() if hasher is None]:
        with open_local(directory) as index:
            for name in boxed:
                chunks = _starts_in_box(name, shards[name])
                digests[name] = dict(zip(chunks, digest_chunks(index, name, chunks), strict=True))
    fault_point("hashed")
    return digests


def _pieces(rest: range, ranges: Iterable[Extent]) -> Iterator[Extent]:
    """The parts of `ranges` that make up `rest`, in order."""
    position = rest.start
    for extent in sorted(ranges, key=lambda extent: extent.start):
        if extent.start <= position < min(extent.stop, rest.stop):
            stop = min(extent.stop, rest.stop)
            yield Extent(position, stop, extent.file, extent.offset + position - extent.start)
            position = stop
    assert position == rest.stop, "a rank writes what follows"


def _starts_in_box(name: str, shard: LocalShard) -> list[int]:
    """The chunks of a tensor that start in this rank's box of it."""
    assert shard.box is not None
    firsts = (
        number * CHUNK_BYTES // shard.data.element_size()
        for number in range(num_chunks(spec_of(name, shard).num_bytes))
    )
    return [number for number, first in enumerate(firsts) if tensor_slices.contains(shard.shape, *shard.box, first)]


def _hasher(name: str, shard: LocalShard) -> RangeHasher | None:
    if shard.box is not None:
        return None
    size = shard.data.element_size()
    total = spec_of(name, shard).num_bytes
    return RangeHasher(total, shard.start * size, shard.start * size + shard.data.nbytes)


class _Writer:
    """Writes ranges of files of `directory`, which are created already."""

    def __init__(self, directory: Path, reading: Reading) -> None:
        self._directory, self._reading = directory, reading
        self._handles = Handles(lambda name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC))

    def write(
        self, name: str, offset: int, shard: LocalShard, part: slice, hasher: RangeHasher | xxhash.xxh3_128 | None
    ) -> None:
        """Write bytes `part` of a shard from byte `offset` of a file on, and hash them on the way."""
        with self._handles.use(name) as handle, atomicity.naming(self._directory / name):
            for start in range(part.start, part.stop, _PIECE_BYTES):
                position = offset + start - part.start
                with self._reading(shard, slice(start, min(start + _PIECE_BYTES, part.stop))) as content:
                    if hasher is not None:
                        hasher.update(content)
                    pwrite_all(handle, position, content)
                    atomicity.start_writeback(handle, position, len(content))

    def sync(self, names: Iterable[str]) -> None:
        """Force the files `names` to the disk."""
        for name in names:
            with self._handles.use(name) as handle, atomicity.naming(self._directory / name):
                os.fsync(handle)

    def close(self) -> None:
        self._handles.close()


def create_file(root: Path, plan: FilePlan) -> None:
    """Make a planned file in `root`, at its full size and with all that is no tensor in it."""
    handle = os.open(root / plan.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with naming(root / plan.name):
            allocate(handle, plan.num_bytes)
            for position, frame in plan.frames:
                pwrite_all(handle, position, memoryview(frame))
    finally:
        os.close(handle)
