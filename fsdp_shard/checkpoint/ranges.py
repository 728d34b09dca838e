"""What one rank writes of a step: its ranges of files that several ranks fill, hashed on their way to the disk.

Local throughout: who waits for whom is `state`'s business. Knows shards and files, no process group and no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp_shard.checkpoint import atomic, boxes
from fsdp_shard.checkpoint.direct import BlockReader, DirectFile, Observe, Stage, ignore
from fsdp_shard.checkpoint.idle import at_idle, at_once
from fsdp_shard.checkpoint.index import open_checkpoint, tensor_bytes
from fsdp_shard.checkpoint.integrity import CHUNK_BYTES, RangeHasher, chunk_digest, digest_chunks, num_chunks
from fsdp_shard.checkpoint.layout import Extent
from fsdp_shard.checkpoint.manifest import FileRecord
from fsdp_shard.checkpoint.points import reach
from fsdp_shard.checkpoint.store import OPTIMIZER
from fsdp_shard.checkpoint.transfer import create_file
from fsdp_shard.checkpoint.writes import WritePlan, spec_of
from fsdp_shard.shards import LocalShard

_PIECE_BYTES = 4 << 20  # read and hashed at once: little enough for the cores' last cache

Digests = dict[str, dict[int, bytes]]  # tensor -> {chunk number: digest}
Hashers = dict[str, RangeHasher | None]  # tensor -> that of this rank's range; None where its part is no range
Records = dict[str, FileRecord]  # file -> size and digest
Heads = dict[str, Extent]  # tensor -> where a rank's range of it lies, if that begins within a chunk
# A shard, and which of its bytes -> those; as long as the block runs, nobody changes them.
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


def plan_heads(plan: WritePlan, shards: Mapping[str, LocalShard]) -> Heads:
    """This rank's ranges of which another rank needs the first bytes, since their chunk begins in its own."""
    heads: Heads = {}
    for name, (file, offset) in plan.places.items():
        shard = shards[name]
        start = shard.start * shard.data.element_size()
        if shard.box is None and start % CHUNK_BYTES:
            heads[name] = Extent(start, start + shard.data.nbytes, file, offset)
    return heads


def create_files(directory: Path, plans: RankPlans) -> None:
    for file in plans.weights.creates:
        create_file(directory, file)
    if plans.optimizer.creates:
        (directory / OPTIMIZER).mkdir(exist_ok=True)
    for folder in sorted({Path(name).parent for name in plans.small_files} - {Path()}):
        (directory / folder).mkdir()
    for file in plans.optimizer.creates:
        create_file(directory / OPTIMIZER, file)
    reach("created")


def as_it_is(shard: LocalShard, part: slice) -> AbstractContextManager[memoryview]:
    """The `Reading` of shards that nobody changes."""
    size = shard.data.element_size()
    return nullcontext(tensor_bytes(shard.data[part.start // size : part.stop // size].cpu()))


def write_ranges(
    directory: Path,
    plans: RankPlans,
    weights: Mapping[str, LocalShard],
    optimizer: Mapping[str, LocalShard],
    reading: Reading,
    is_behind: bool,
) -> tuple[Hashers, Records]:
    """Put all that is this rank's in its place and on the disk; each element is read once, through `reading`.

    A save that `is_behind` the training leaves the cores to it (`idle`).

    Returns what has hashed the weights, by name, and the records of the files it made.
    """
    hashers = {name: _hasher(name, weights[name]) for name in plans.weights.places}
    records = {
        file.name: FileRecord(file.num_bytes, header_digest=chunk_digest(file.header).hex())
        for file in plans.weights.creates
    }
    do = at_idle if is_behind else at_once
    with _Writer(directory, reading, is_behind) as writer:
        do(_write_weights(writer, plans.weights, weights, hashers))
        writer.flush()
        reach("weights-written")
        for plan in plans.optimizer.creates:  # this rank's only one
            whole = xxhash.xxh3_128(plan.header)
            do(_write_optimizer(writer, plan.name, plans.optimizer, optimizer, whole.update))
            records[f"{OPTIMIZER}/{plan.name}"] = FileRecord(plan.num_bytes, digest=whole.hexdigest())
        small_files = {**plans.weights.small_files, **plans.small_files}
        for name, content in small_files.items():
            atomic.write_file(directory / name, content)
            records[name] = FileRecord(len(content), digest=chunk_digest(content).hex())
        writer.flush()
        reach("optimizer-written")
        writer.sync([plan.name for plan in plans.weights.creates])
        writer.sync([f"{OPTIMIZER}/{plan.name}" for plan in plans.optimizer.creates])
    reach("synced")
    return hashers, records


def _write_weights(
    writer: _Writer, plan: WritePlan, shards: Mapping[str, LocalShard], hashers: Hashers
) -> Iterator[None]:
    for name, (file, _) in plan.places.items():
        # The rows of a box lie in chunks of several ranks: those are hashed when they are on the disk.
        observe = hasher.update if (hasher := hashers[name]) is not None else ignore
        for offset, part in plan.runs(name, shards[name]):
            yield from writer.write(file, offset, shards[name], part, observe)


def _write_optimizer(
    writer: _Writer, file: str, plan: WritePlan, shards: Mapping[str, LocalShard], observe: Observe
) -> Iterator[None]:
    """Front to back, as the digest is of the whole file."""
    for name, (_, offset) in plan.places.items():
        shard = shards[name]
        yield from writer.write(f"{OPTIMIZER}/{file}", offset, shard, slice(0, shard.data.nbytes), observe)


def hash_shared_chunks(
    directory: Path, shards: Mapping[str, LocalShard], hashers: Hashers, heads: Sequence[Heads], is_behind: bool
) -> Digests:
    """The digests of all chunks that begin in this rank's part; what another rank has of them is read from the disk,
    where `heads`, of all ranks, say.
    """
    do = at_idle if is_behind else at_once
    ranges = {name: hasher for name, hasher in hashers.items() if hasher is not None}
    reader = BlockReader(directory, CHUNK_BYTES, past_cache=is_behind)
    try:
        do(_finish_hashes(reader, ranges, heads))
    finally:
        reader.close()
    digests = {name: hasher.digests for name, hasher in ranges.items()}
    if boxed := [name for name, hasher in hashers.items() if hasher is None]:
        do(_hash_boxes(directory, {name: shards[name] for name in boxed}, digests))
    reach("hashed")
    return digests


def _finish_hashes(reader: BlockReader, hashers: Mapping[str, RangeHasher], heads: Sequence[Heads]) -> Iterator[None]:
    for name, hasher in hashers.items():
        if rest := hasher.rest:
            for piece in _pieces(rest, [theirs[name] for theirs in heads if name in theirs]):
                hasher.finish(reader.read(piece.file, piece.offset, piece.stop - piece.start))
                yield


def _hash_boxes(directory: Path, shards: Mapping[str, LocalShard], digests: Digests) -> Iterator[None]:
    with open_checkpoint(directory) as index:
        for name, shard in shards.items():
            mine, found = _begins_in_box(name, shard), digests.setdefault(name, {})
            for number, digest in zip(mine, digest_chunks(index, name, mine), strict=True):
                found[number] = digest
                yield


def _pieces(rest: range, heads: Iterable[Extent]) -> Iterator[Extent]:
    """The parts of `heads` that make up `rest`, in order."""
    position = rest.start
    for head in sorted(heads, key=lambda head: head.start):
        if head.start <= position < min(head.stop, rest.stop):
            stop = min(head.stop, rest.stop)
            yield Extent(position, stop, head.file, head.offset + position - head.start)
            position = stop
    assert position == rest.stop, "a rank writes what follows"


def _begins_in_box(name: str, shard: LocalShard) -> list[int]:
    """The chunks of a tensor that begin in this rank's box of it."""
    assert shard.box is not None
    firsts = (
        number * CHUNK_BYTES // shard.data.element_size()
        for number in range(num_chunks(spec_of(name, shard).num_bytes))
    )
    return [number for number, first in enumerate(firsts) if boxes.contains(shard.shape, *shard.box, first)]


def _hasher(name: str, shard: LocalShard) -> RangeHasher | None:
    if shard.box is not None:
        return None
    size = shard.data.element_size()
    total = spec_of(name, shard).num_bytes
    return RangeHasher(total, shard.start * size, shard.start * size + shard.data.nbytes)


class _Writer:
    """Writes ranges of files of `directory` that are there already, and has them on the disk when `sync` returns."""

    def __init__(self, directory: Path, reading: Reading, past_cache: bool) -> None:
        self._directory, self._reading, self._stage = directory, reading, Stage() if past_cache else None
        self._files: dict[str, DirectFile] = {}

    def write(self, name: str, offset: int, shard: LocalShard, part: slice, observe: Observe) -> Iterator[None]:
        """Bytes of a shard from byte `offset` of the file on, some MiB at a time; `observe` sees them, in order."""
        file = self._open(name)
        for first in range(part.start, part.stop, _PIECE_BYTES):
            with self._reading(shard, slice(first, min(first + _PIECE_BYTES, part.stop))) as content:
                if self._stage is not None:
                    self._stage.put(file, offset + first - part.start, content, observe)
                else:
                    observe(content)
                    file.write(offset + first - part.start, content)
            yield

    def flush(self) -> None:
        """Have nothing that was written in the stage alone."""
        if self._stage is not None:
            self._stage.write()

    def sync(self, names: Iterable[str]) -> None:
        """Have all that was written and flushed, and the files `names`, on the disk."""
        for name in names:
            self._open(name)
        for file in self._files.values():
            file.sync()

    def _open(self, name: str) -> DirectFile:
        if name not in self._files:
            self._files[name] = DirectFile(self._directory / name, past_cache=self._stage is not None)
        return self._files[name]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
