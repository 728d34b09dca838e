"""Moves tensors from an index into planned files: read a range, cast it if asked, hash it, write it. Streams.

Bytes that stay as they are, in long runs, are copied by the kernel, as `cp` does, and read only to be hashed. A step
holds at most a few MiB in reused buffers, whatever the size of a tensor. torch is imported only to cast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from fsdp_shard.checkpoint.atomic import allocate, fsync_file, naming, start_writeback
from fsdp_shard.checkpoint.checks.non_finite import find_non_finite
from fsdp_shard.checkpoint.dtypes import TensorSpec, itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.entries import Span
from fsdp_shard.checkpoint.files import Handles, page_aligned, pwrite_all, with_even_middle
from fsdp_shard.checkpoint.header import PAGE_BYTES
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity import CHUNK_BYTES, chunk_digest, digest_chunks, num_chunks
from fsdp_shard.checkpoint.layout import Extent, FilePlan
from fsdp_shard.checkpoint.threads import ahead, in_threads
from fsdp_shard.errors import CheckpointError

_AHEAD = 4  # pieces read while one is written
_COPY_BYTES = 32 << 20  # of a piece that is copied
_READ_BYTES = 4 << 20  # of it that is read and written
_PART_BYTES = 8 << 20  # of it that is copied, and sent on its way to the disk, at once
_EDGE_BYTES = 64 << 10  # the kernel copies in steps, and makes pages of a file as large as each step is aligned

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to write: `target` says under which dtype, `extents` partition its bytes in flat order."""

    target: TensorSpec
    source_dtype: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of the target of `move`, from byte `start` on: `data`, or those that lie in `spans` of the source, or those
    that are still to be read.

    `data` is good until _AHEAD more pieces are made.
    """

    move: Move
    start: int
    num_bytes: int
    data: memoryview | None = None
    spans: Sequence[Span] = ()


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
    writer = _Writer(index, root, sync)
    try:
        reader = _Reader(index, expected, digests)
        with closing(ahead(reader.pieces(moves), _AHEAD)) as pieces:
            for piece in pieces:
                for part in reader.read(piece):
                    writer.write(part)
                    progress(part.num_bytes)
    finally:
        writer.close()
    if sync:
        in_threads(_sync, [root / plan.name for plan in plans])
    return digests


def _sync(paths: Iterator[Path]) -> None:
    for path in paths:
        fsync_file(path)


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


def compare_with(index: TensorIndex, digests: Mapping[str, Sequence[bytes]], progress: Progress) -> str | None:
    """Read every tensor of `index` back; what is the first difference from `digests`, in words, or None."""
    if set(index.names) != set(digests):
        return f"the tensors {sorted(set(index.names) ^ set(digests))} are missing or extra"
    problems: list[str] = []

    def work(names: Iterator[str]) -> None:
        for name in names:
            for number, found in enumerate(digest_chunks(index, name)):
                if found != digests[name][number]:
                    problems.append(f"{index.describe_chunk(name, number)} was not read back as written")
            progress(index.tensors[name].num_bytes)

    in_threads(work, list(digests))
    return problems[0] if problems else None


def _is_cast(move: Move) -> bool:
    return move.target.dtype != move.source_dtype


def _step_elements(move: Move) -> int:
    """Elements of the smallest step that is whole chunks both of the source and of the target."""
    return CHUNK_BYTES // min(itemsize(move.source_dtype), itemsize(move.target.dtype))


class _Reader:
    """Reads, checks, casts and hashes what is to be written, in pieces of whole chunks."""

    def __init__(
        self, index: TensorIndex, expected: Mapping[str, Sequence[str]], digests: dict[str, list[bytes]]
    ) -> None:
        self._index, self._expected, self._digests = index, expected, digests
        self._source = _Buffer()  # of what is not to be written as it is
        self._ring = cycle([_Buffer() for _ in range(_AHEAD + 1)])  # of what was cast
        self._last = _Buffer()  # of what was read by who writes it

    def pieces(self, moves: Iterable[Move]) -> Iterator[_Piece]:
        """Whatever can be done while something else is written, is done: casts, and the hashes of what is copied."""
        for move in moves:
            step, total = _step_elements(move), move.target.num_elements
            size = itemsize(move.target.dtype)
            many = max(_COPY_BYTES // (step * size), 1) * step
            for first in range(0, total, many):
                last = min(first + many, total)
                spans = self._to_copy(move, first, last)
                starts = range(first, last, step)
                if spans is not None:
                    for start in starts:
                        self._read(move, start, min(step, last - start), self._source)
                    yield _Piece(move, first * size, (last - first) * size, spans=spans)
                elif _is_cast(move):
                    for start in starts:
                        data = self._read(move, start, min(step, last - start), next(self._ring))
                        yield _Piece(move, start * size, len(data), data)
                else:
                    yield _Piece(move, first * size, (last - first) * size)

    def read(self, piece: _Piece) -> Iterator[_Piece]:
        """`piece`, or its parts as they are read: by who writes them, or they would be in the cache of another core."""
        if piece.spans or piece.data is not None:
            yield piece
            return
        move, size = piece.move, itemsize(piece.move.target.dtype)
        step = _READ_BYTES // size
        first, last = piece.start // size, (piece.start + piece.num_bytes) // size
        for start in range(first, last, step):
            data = self._read(move, start, min(step, last - start), self._last)
            yield _Piece(move, start * size, len(data), data)

    def _to_copy(self, move: Move, first: int, last: int) -> list[Span] | None:
        """Where the elements [first, last) lie, if they can be copied from there."""
        if _is_cast(move) or not self._index.is_in_long_runs(move.target.name):
            return None
        spans = self._index.places(move.target.name, first, last)
        return spans if _page_for_page(move, first * itemsize(move.target.dtype), spans) else None

    def _read(self, move: Move, start: int, count: int, buffer: _Buffer) -> memoryview:
        """What is to be written for `count` elements from `start` on, in `buffer`."""
        name, size = move.target.name, itemsize(move.source_dtype)
        is_cast = _is_cast(move)
        data = (self._source if is_cast else buffer).take(count * size)
        self._index.read_into(name, start, data)
        found = _chunks(data)
        self._check(name, start * size // CHUNK_BYTES, found)
        if is_cast:
            data = self._cast(move, data, buffer.take(count * itemsize(move.target.dtype)))
            found = _chunks(data)
        first = start * itemsize(move.target.dtype) // CHUNK_BYTES
        self._digests[name][first : first + len(found)] = found
        return data

    def _check(self, name: str, first: int, found: Sequence[bytes]) -> None:
        expected = self._expected.get(name)
        if expected is None:
            return
        for number, digest in enumerate(found, start=first):
            if digest.hex() != expected[number]:
                raise CheckpointError(
                    f"{self._index.describe_chunk(name, number)} does not have the digest in the manifest of "
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


def _page_for_page(move: Move, at: int, spans: Sequence[Span]) -> bool:
    """Whether the bytes from `at` on, which lie in `spans`, go to the same bytes of pages as they come from.

    Copying others takes the kernel half as long again, and reading and writing them does not.
    """
    for span in spans:
        place = next(extent.offset + at - extent.start for extent in move.extents if extent.start <= at < extent.stop)
        if (span.start - place) % PAGE_BYTES:
            return False
        at += span.num_bytes
    return True


class _Buffer:
    """Memory that is used again, and grows to what is asked of it."""

    def __init__(self) -> None:
        self._view = page_aligned(CHUNK_BYTES)

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._view):
            self._view = page_aligned(num_bytes)
        return self._view[:num_bytes]


class _Writer:
    """Puts pieces in their places in the files of `root`."""

    def __init__(self, index: TensorIndex, root: Path, sync: bool) -> None:
        self._index, self._root, self._sync = index, root, sync
        self._handles = Handles(lambda name: os.open(root / name, os.O_WRONLY | os.O_CLOEXEC))

    def write(self, piece: _Piece) -> None:
        if piece.data is not None:
            self._put(piece, piece.start, piece.data)
        at = piece.start
        for span in piece.spans:
            self._put(piece, at, span)
            at += span.num_bytes

    def _put(self, piece: _Piece, at: int, data: memoryview | Span) -> None:
        """Write `data`, which begins at byte `at` of the tensor, to wherever its extents are."""
        stop = at + (data.num_bytes if isinstance(data, Span) else len(data))
        for extent in piece.move.extents:
            low, high = max(at, extent.start), min(stop, extent.stop)
            if low < high:
                offset = extent.offset + low - extent.start
                with self._handles.use(extent.file) as handle, naming(self._root / extent.file):
                    if isinstance(data, Span):
                        self._copy(data.file, data.start + low - at, handle, offset, high - low)
                    else:
                        pwrite_all(handle, offset, data[low - at : high - at])
                        self._send(handle, offset, high - low)

    def _copy(self, name: str, start: int, handle: int, offset: int, num_bytes: int) -> None:
        for low, high in with_even_middle(offset, offset + num_bytes, _PART_BYTES, _EDGE_BYTES):
            first = start + low - offset
            self._index.copy(Span(name, first, first + high - low), handle, low)
            self._send(handle, low, high - low)

    def _send(self, handle: int, offset: int, num_bytes: int) -> None:
        if self._sync:
            start_writeback(handle, offset, num_bytes)

    def close(self) -> None:
        self._handles.close()


def _chunks(data: memoryview) -> list[bytes]:
    return [chunk_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
