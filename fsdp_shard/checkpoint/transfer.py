"""Moves tensors from an index into planned files: read a range, check it, cast it if asked, hash it, write it. Streams.

Two threads do all of that, a few MiB at a time, so that what one has read is still in its core's cache when it is
hashed and written. Where the file system can have two files share their blocks, the target gets those of the source for
bytes that stay as they are. torch is imported only to cast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, chunk_digest, describe_chunk, digest_chunks, num_chunks
from fsdp_shard.checkpoint.index import Span, TensorIndex
from fsdp_shard.checkpoint.integrity.non_finite import find_non_finite
from fsdp_shard.checkpoint.io.atomicity import fsync_file, naming, start_writeback
from fsdp_shard.checkpoint.io.dtypes import TensorSpec, itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.io.files import Handles, page_aligned, pwrite_all
from fsdp_shard.checkpoint.io.safetensors_header import PAGE_BYTES
from fsdp_shard.checkpoint.io.thread_pool import in_threads
from fsdp_shard.checkpoint.sharded_state.write_shards import create_file
from fsdp_shard.checkpoint.steps.file_plan import Extent, FilePlan
from fsdp_shard.errors import CheckpointError

_STEP_BYTES = 4 << 20  # read, hashed and written at a time
_SHARE_BYTES = 32 << 20  # what a thread takes at a time: neighbors, so that each file is read and written in order

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to write: `target` says under which dtype, `extents` partition its bytes in flat order."""

    target: TensorSpec
    source_dtype: str
    extents: tuple[Extent, ...]

    @property
    def is_cast(self) -> bool:
        return self.target.dtype != self.source_dtype

    def shares(self) -> Iterator[tuple[Move, range]]:
        """All of it in parts for threads: the first elements of the steps of each."""
        size = max(itemsize(self.source_dtype), itemsize(self.target.dtype))
        step = _STEP_BYTES // size  # whole chunks of both, as no size is more than four times the other
        many, total = _SHARE_BYTES // _STEP_BYTES * step, self.target.num_elements
        return ((self, range(first, min(first + many, total), step)) for first in range(0, total, many))


def move_tensors(
    index: TensorIndex,
    moves: Sequence[Move],
    plans: Sequence[FilePlan],
    root: Path,
    expected: Mapping[str, Sequence[str]],
    progress: Progress,
    *,
    sync: bool = True,
) -> dict[str, list[bytes]]:
    """Write the files of `plans` into the directory `root`; returns the chunk digests as written.

    With `sync` their way to the disk begins at once, and has ended when this returns.

    `expected` maps tensors to the digests (hex) that the chunks of the source must have; a chunk that differs is a
    CheckpointError naming file, tensor and byte range. `progress` is told the bytes written.
    """
    digests = {move.target.name: [b""] * num_chunks(move.target.num_bytes) for move in moves}
    for plan in plans:
        create_file(root, plan)
    writer = _Writer(index, root, [plan.name for plan in plans], sync)

    def work(shares: Iterator[tuple[Move, range]]) -> None:
        reader = _Reader(index, expected, digests)
        for move, starts in shares:
            for start in starts:
                data = reader.read(move, start, min(starts.step, move.target.num_elements - start))
                writer.write(move, start, data)
                progress(len(data))

    try:
        in_threads(work, [share for move in moves for share in move.shares()])
    finally:
        writer.close()
    if sync:
        in_threads(_sync, [root / plan.name for plan in plans])
    return digests


def _sync(paths: Iterator[Path]) -> None:
    for path in paths:
        fsync_file(path)


def compare_with(index: TensorIndex, digests: Mapping[str, Sequence[bytes]], progress: Progress) -> str | None:
    """Read every tensor of `index` back; what is the first difference from `digests`, in words, or None."""
    if set(index.names) != set(digests):
        return f"the tensors {sorted(set(index.names) ^ set(digests))} are missing or extra"
    problems: list[str] = []

    def work(names: Iterator[str]) -> None:
        for name in names:
            for number, found in enumerate(digest_chunks(index, name)):
                if found != digests[name][number]:
                    problems.append(f"{describe_chunk(index, name, number)} was not read back as written")
            progress(index.tensors[name].num_bytes)

    in_threads(work, list(digests))
    return problems[0] if problems else None


class _Reader:
    """Reads, checks, casts and hashes what is to be written; one for each thread."""

    def __init__(
        self, index: TensorIndex, expected: Mapping[str, Sequence[str]], digests: dict[str, list[bytes]]
    ) -> None:
        self._index, self._expected, self._digests = index, expected, digests
        self._source, self._cast_to = page_aligned(_STEP_BYTES), page_aligned(_STEP_BYTES)

    def read(self, move: Move, start: int, count: int) -> memoryview:
        """What is to be written for `count` elements from `start` on; good until the next call."""
        name, size = move.target.name, itemsize(move.source_dtype)
        data = self._source[: count * size]
        self._index.read_into(name, start, data)
        found = _chunks(data)
        self._check(name, start * size // CHUNK_BYTES, found)
        if move.is_cast:
            size = itemsize(move.target.dtype)
            data = self._cast(move, data, self._cast_to[: count * size])
            found = _chunks(data)
        first = start * size // CHUNK_BYTES
        self._digests[name][first : first + len(found)] = found
        return data

    def _check(self, name: str, first: int, found: Sequence[bytes]) -> None:
        expected = self._expected.get(name)
        if expected is None:
            return
        for number, digest in enumerate(found, start=first):
            if digest.hex() != expected[number]:
                raise CheckpointError(
                    f"{describe_chunk(self._index, name, number)} does not have the digest in the manifest of "
                    f"{self._index.root}: the checkpoint is damaged, so it is not converted."
                )

    def _cast(self, move: Move, data: memoryview, out: memoryview) -> memoryview:
        import torch

        source = torch.frombuffer(data, dtype=to_torch(move.source_dtype))
        cast = torch.frombuffer(out, dtype=to_torch(move.target.dtype)).copy_(source)
        if find_non_finite(move.target.dtype, out) is not None:
            self._refuse_overflow(move, int((source.isfinite() & ~cast.isfinite()).sum()))
        return out

    def _refuse_overflow(self, move: Move, num_lost: int) -> None:
        if num_lost:
            target = torch_name(move.target.dtype)
            raise CheckpointError(
                f"{self._index.place}: tensor {move.target.name} holds values ({num_lost:,} or more) that are too "
                f"large for {target} and would become infinite; choose another dtype, such as bfloat16 or float32."
            )


class _Writer:
    """Puts what was read in its place in the files of `root`; for several threads.

    One at a time writes to a file: where two do, the kernel has one spin until the other is done.
    """

    def __init__(self, index: TensorIndex, root: Path, names: Iterable[str], sync: bool) -> None:
        self._index, self._root, self._sync = index, root, sync
        self._handles = Handles(lambda name: os.open(root / name, os.O_WRONLY | os.O_CLOEXEC))
        self._locks = {name: Lock() for name in names}
        self._clones = True  # until the file system has shown that it cannot

    def write(self, move: Move, start: int, data: memoryview) -> None:
        """Write `data`, the elements of `move` from `start` on, to wherever its extents are."""
        at = start * itemsize(move.target.dtype)
        for extent in move.extents:
            low, high = max(at, extent.start), min(at + len(data), extent.stop)
            if low < high:
                offset = extent.offset + low - extent.start
                spans = self._to_clone(move, low, high)
                with self._handles.use(extent.file) as handle, naming(self._root / extent.file):
                    with self._locks[extent.file]:
                        self._put(handle, offset, data[low - at : high - at], spans)
                    if self._sync:
                        start_writeback(handle, offset, high - low)

    def _to_clone(self, move: Move, low: int, high: int) -> Sequence[Span]:
        """Where the bytes [low, high) of `move` lie, if they may lie there as they are to be written."""
        if not self._clones or move.is_cast or not self._index.is_in_long_runs(move.target.name):
            return ()
        size = itemsize(move.target.dtype)
        return self._index.places(move.target.name, low // size, high // size)

    def _put(self, handle: int, offset: int, data: memoryview, spans: Sequence[Span]) -> None:
        """Write `data`, which lies in `spans`, to `offset`: whole pages of it by sharing them, where that can be."""
        for span in spans:
            end = offset + span.num_bytes
            first, last = self._clone(span, handle, offset)
            pwrite_all(handle, offset, data[: first - offset])
            pwrite_all(handle, last, data[last - offset : end - offset])
            offset, data = end, data[end - offset :]
        pwrite_all(handle, offset, data)

    def _clone(self, span: Span, handle: int, offset: int) -> tuple[int, int]:
        """The bytes [first, last) of the file that are now those of `span`, which goes to `offset`; none at its end."""
        end = offset + span.num_bytes
        first, last = offset + -offset % PAGE_BYTES, end - end % PAGE_BYTES
        if self._clones and first < last and (span.start - offset) % PAGE_BYTES == 0:
            whole = Span(span.file, span.start + first - offset, span.start + last - offset)
            if self._index.clone(whole, handle, first):
                return first, last
            self._clones = False
        return end, end

    def close(self) -> None:
        self._handles.close()


def _chunks(data: memoryview) -> list[bytes]:
    return [chunk_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
