"""Moves tensors from an index into planned files: reads a range, checks, optionally casts, hashes and writes it.

Two threads each do all steps for a few MiB at a time, so that the data is still in the core's cache when it is hashed
and written. If the file system can share blocks between files, unchanged bytes are not copied. torch is imported only
to cast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from fsdp_shard.checkpoint.digests import complete_chunk_digests, describe_chunk, read_chunk_digests
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.non_finite import find_non_finite
from fsdp_shard.checkpoint.io import PAGE_BYTES, FilePool, in_threads, page_aligned, pwrite_all, start_writeback
from fsdp_shard.checkpoint.io.safetensors_format import TensorSpec, itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.sharded_state.write_shards import Digests, create_file
from fsdp_shard.checkpoint.steps.file_plan import Extent, FilePlan
from fsdp_shard.checkpoint.tensor_entry import Span
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import fsync_path, name_in_errors

_STEP_BYTES = 4 << 20  # read, hashed and written at a time
_JOB_BYTES = 32 << 20  # per job of a thread: adjacent bytes, so that each file is read and written in order

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to write: `target` has the new dtype, `extents` partition its bytes in flat order."""

    target: TensorSpec
    source_dtype: str
    extents: tuple[Extent, ...]

    @property
    def is_cast(self) -> bool:
        """Whether the tensor is written in another dtype."""
        return self.target.dtype != self.source_dtype

    def jobs(self) -> Iterator[tuple[Move, range]]:
        """Divide the tensor into jobs for threads, each with the first elements of its steps."""
        size = max(itemsize(self.source_dtype), itemsize(self.target.dtype))
        step = _STEP_BYTES // size  # whole chunks of both dtypes, as neither size is more than four times the other
        many, total = _JOB_BYTES // _STEP_BYTES * step, self.target.num_elements
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
) -> Digests:
    """Write planned files.

    Args:
        index: The source.
        moves: The tensors to write.
        plans: The files to create.
        root: The directory to create them in.
        expected: Known digests (hex) of the chunks of source tensors.
        progress: Called with the number of bytes of each write.
        sync: Return only when the files are on the disk.

    Returns:
        The digests of the chunks of each tensor as written.

    Raises:
        CheckpointError: A chunk of the source is damaged, or a value is too large for the new dtype.
        OSError: A file could not be written.
    """
    digests: Digests = {move.target.name: {} for move in moves}
    for plan in plans:
        create_file(root, plan)
    writer = _Writer(index, root, [plan.name for plan in plans], sync=sync)

    def work(jobs: Iterator[tuple[Move, range]]) -> None:
        reader = _Reader(index, expected, digests)
        for move, starts in jobs:
            for start in starts:
                data = reader.read(move, start, min(starts.step, move.target.num_elements - start))
                writer.write(move, start, data)
                progress(len(data))

    try:
        in_threads(work, [job for move in moves for job in move.jobs()])
    finally:
        writer.close()
    if sync:
        in_threads(_sync, [root / plan.name for plan in plans])
    return digests


def _sync(paths: Iterator[Path]) -> None:
    for path in paths:
        fsync_path(path)


def compare_with(index: TensorIndex, digests: Digests, progress: Progress) -> str | None:
    """Read every tensor of `index` back; return the first difference from `digests` as text, or None."""
    if set(index.names) != set(digests):
        return f"the tensors {sorted(set(index.names) ^ set(digests))} are missing or unexpected"
    problems: list[str] = []

    def work(names: Iterator[str]) -> None:
        for name in names:
            for number, found in enumerate(read_chunk_digests(index, name)):
                if found != digests[name][number]:
                    problems.append(f"{describe_chunk(index, name, number)} was not read back as written")
            progress(index.tensors[name].num_bytes)

    in_threads(work, list(digests))
    return problems[0] if problems else None


class _Reader:
    """Reads, checks, casts and hashes the data to write; one per thread."""

    def __init__(self, index: TensorIndex, expected: Mapping[str, Sequence[str]], digests: Digests) -> None:
        self._index, self._expected, self._digests = index, expected, digests
        self._source, self._cast_to = page_aligned(_STEP_BYTES), page_aligned(_STEP_BYTES)

    def read(self, move: Move, start: int, count: int) -> memoryview:
        """Return the bytes to write for `count` elements from element `start` on; valid until the next call."""
        name, size = move.target.name, itemsize(move.source_dtype)
        data = self._source[: count * size]
        self._index.read_into(name, start, data)
        found = complete_chunk_digests(data, start * size, move.target.num_elements * size)
        self._check(name, found)
        if move.is_cast:
            size = itemsize(move.target.dtype)
            data = self._cast(move, data, self._cast_to[: count * size])
            found = complete_chunk_digests(data, start * size, move.target.num_bytes)
        self._digests[name].update(found)
        return data

    def _check(self, name: str, found: Mapping[int, bytes]) -> None:
        expected = self._expected.get(name)
        for number, digest in found.items():
            if expected is not None and digest.hex() != expected[number]:
                raise CheckpointError(
                    f"{describe_chunk(self._index, name, number)} does not have the digest in the manifest of "
                    f"{self._index.root}: the checkpoint is damaged, so it is not converted."
                )

    def _cast(self, move: Move, data: memoryview, out: memoryview) -> memoryview:
        import torch

        source = torch.frombuffer(data, dtype=to_torch(move.source_dtype))
        cast = torch.frombuffer(out, dtype=to_torch(move.target.dtype)).copy_(source)
        if find_non_finite(move.target.dtype, out) is None:
            return out
        if num_lost := int((source.isfinite() & ~cast.isfinite()).sum()):
            raise CheckpointError(
                f"{self._index.path}: tensor {move.target.name} holds values ({num_lost:,} or more) that are too "
                f"large for {torch_name(move.target.dtype)} and would become infinite; choose another dtype, "
                f"such as bfloat16 or float32."
            )
        return out


class _Writer:
    """Writes bytes to their offsets in the files of `root`; thread-safe.

    Only one thread at a time writes to a file: the kernel would make a second one spin until the first is done.
    """

    def __init__(self, index: TensorIndex, root: Path, names: Sequence[str], *, sync: bool) -> None:
        self._index, self._root, self._sync = index, root, sync
        self._pool = FilePool(lambda name: os.open(root / name, os.O_WRONLY | os.O_CLOEXEC))
        self._locks = {name: Lock() for name in names}
        self._clones = True  # until the file system refuses

    def write(self, move: Move, start: int, data: memoryview) -> None:
        """Write `data`, the elements of `move` from `start` on, to its extents."""
        at = start * itemsize(move.target.dtype)
        for extent in move.extents:
            low, high = max(at, extent.start), min(at + len(data), extent.stop)
            if low < high:
                offset = extent.offset + low - extent.start
                spans = self._to_clone(move, low, high)
                with self._pool.use(extent.file) as handle, name_in_errors(self._root / extent.file):
                    with self._locks[extent.file]:
                        self._put(handle, offset, data[low - at : high - at], spans)
                    if self._sync:
                        start_writeback(handle, offset, high - low)

    def _to_clone(self, move: Move, low: int, high: int) -> Sequence[Span]:
        """Return the source spans of the bytes [low, high) of `move`, if they can be written unchanged."""
        if not self._clones or move.is_cast or not self._index.entry(move.target.name).is_in_long_runs:
            return ()
        size = itemsize(move.target.dtype)
        return self._index.spans(move.target.name, low // size, high // size)

    def _put(self, handle: int, offset: int, data: memoryview, spans: Sequence[Span]) -> None:
        """Write `data`, which is stored in `spans`, to `offset`: whole pages by sharing blocks if possible."""
        for span in spans:
            end = offset + span.num_bytes
            first, last = self._clone(span, handle, offset)
            pwrite_all(handle, offset, data[: first - offset])
            pwrite_all(handle, last, data[last - offset : end - offset])
            offset, data = end, data[end - offset :]
        pwrite_all(handle, offset, data)

    def _clone(self, span: Span, handle: int, offset: int) -> tuple[int, int]:
        """Write `span` to `offset` by sharing blocks, if possible; return the bytes [first, last) that share them."""
        end = offset + span.num_bytes
        first, last = offset + -offset % PAGE_BYTES, end - end % PAGE_BYTES
        if self._clones and first < last and (span.start - offset) % PAGE_BYTES == 0:
            whole = Span(span.file, span.start + first - offset, span.start + last - offset)
            if self._index.reader.files.clone(whole.file, whole.start, whole.num_bytes, handle, first):
                return first, last
            self._clones = False
        return end, end

    def close(self) -> None:
        self._pool.close()
