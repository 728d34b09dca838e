"""Moves tensors from an index into planned files: read a range, cast it if asked, hash it, write it. Streams.

A step holds at most a few MiB in reused buffers, whatever the size of a tensor. torch is imported only to cast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from fsdp_shard.checkpoint.atomic import fsync_file, naming, start_writeback
from fsdp_shard.checkpoint.dtypes import TensorSpec, itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.files import Handles, pwrite_all
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity import CHUNK_BYTES, chunk_digest, digest_chunks, num_chunks
from fsdp_shard.checkpoint.layout import Extent, FilePlan
from fsdp_shard.errors import CheckpointError

NUM_THREADS = 2  # one reads while the other writes (docs/decisions.md)
_JOB_BYTES = 32 << 20

Progress = Callable[[int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to write: `target` says under which dtype, `extents` partition its bytes in flat order."""

    target: TensorSpec
    source_dtype: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """The flat elements [start, stop) of one move; begins and ends at chunk borders of both source and target."""

    move: Move
    start: int
    stop: int


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
    handles = Handles(lambda name: os.open(root / name, os.O_WRONLY | os.O_CLOEXEC))

    def work(jobs: Iterator[_Job]) -> None:
        mover = _Mover(index, handles, expected, digests, sync)
        for job in jobs:
            mover.run(job)
            progress((job.stop - job.start) * itemsize(job.move.target.dtype))

    try:
        in_threads(work, _apart(list(_jobs(moves))))
    finally:
        handles.close()
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
            os.truncate(handle, plan.num_bytes)
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


def in_threads(work: Callable[[Iterator[T]], object], items: Sequence[T]) -> None:
    """Let NUM_THREADS calls of `work` share out `items`; the first exception stops all of them and is raised."""
    lock, left, stopped = threading.Lock(), iter(items), threading.Event()

    def share() -> Iterator[T]:
        while not stopped.is_set():
            with lock:
                item = next(left, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # not _END, so a T

    def guarded() -> None:
        try:
            work(share())
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(guarded) for _ in range(min(NUM_THREADS, len(items)))]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()


_END = object()


def _jobs(moves: Sequence[Move]) -> Iterator[_Job]:
    for move in moves:
        step = _step_elements(move)
        total = move.target.num_elements
        many = max(_JOB_BYTES // (step * itemsize(move.target.dtype)), 1) * step
        for start in range(0, total, many):
            yield _Job(move, start, min(start + many, total))


def _apart(jobs: Sequence[_Job]) -> list[_Job]:
    """The jobs of the first and of the second half by turns: two threads at one file wait for each other's writes."""
    half = max(-(-len(jobs) // NUM_THREADS), 1)
    turns = zip_longest(*(jobs[start : start + half] for start in range(0, len(jobs), half)))
    return [job for turn in turns for job in turn if job is not None]


def _step_elements(move: Move) -> int:
    """Elements of the smallest step that is whole chunks both of the source and of the target."""
    return CHUNK_BYTES // min(itemsize(move.source_dtype), itemsize(move.target.dtype))


class _Mover:
    """One thread's buffers."""

    def __init__(
        self,
        index: TensorIndex,
        handles: Handles,
        expected: Mapping[str, Sequence[str]],
        digests: dict[str, list[bytes]],
        sync: bool,
    ) -> None:
        self._index, self._handles, self._expected, self._digests = index, handles, expected, digests
        self._sync = sync
        self._source = memoryview(bytearray(CHUNK_BYTES))
        self._target = memoryview(bytearray(CHUNK_BYTES))

    def run(self, job: _Job) -> None:
        move, step = job.move, _step_elements(job.move)
        name, size = move.target.name, itemsize(move.source_dtype)
        for start in range(job.start, job.stop, step):
            count = min(step, job.stop - start)
            if count * size > len(self._source):
                self._source = memoryview(bytearray(step * size))
            data = self._source[: count * size]
            self._index.read_into(name, start, data)
            found = _chunks(data)
            self._check(name, start * size // CHUNK_BYTES, found)
            if move.target.dtype != move.source_dtype:
                data = self._cast(move, data, count)
                found = _chunks(data)
            at = start * itemsize(move.target.dtype)
            first = at // CHUNK_BYTES
            self._digests[name][first : first + len(found)] = found
            self._write(move.extents, at, data)

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

    def _cast(self, move: Move, data: memoryview, count: int) -> memoryview:
        import torch

        num_bytes = count * itemsize(move.target.dtype)
        if num_bytes > len(self._target):
            self._target = memoryview(bytearray(_step_elements(move) * itemsize(move.target.dtype)))
        out = self._target[:num_bytes]
        source = torch.frombuffer(data, dtype=to_torch(move.source_dtype))
        cast = torch.frombuffer(out, dtype=to_torch(move.target.dtype)).copy_(source)
        if not cast.isfinite().all():
            self._refuse_overflow(move, int((source.isfinite() & ~cast.isfinite()).sum()))
        return out

    def _refuse_overflow(self, move: Move, num_lost: int) -> None:
        if num_lost:
            target = torch_name(move.target.dtype)
            raise CheckpointError(
                f"{self._index.place}: tensor {move.target.name} holds values ({num_lost:,} or more) that are too "
                f"large for {target} and would become infinite; choose another dtype, such as bfloat16 or float32."
            )

    def _write(self, extents: Sequence[Extent], at: int, data: memoryview) -> None:
        stop = at + len(data)
        for extent in extents:
            low, high = max(at, extent.start), min(stop, extent.stop)
            if low < high:
                offset = extent.offset + low - extent.start
                with self._handles.use(extent.file) as handle:
                    pwrite_all(handle, offset, data[low - at : high - at])
                    if self._sync:
                        start_writeback(handle, offset, high - low)


def _chunks(data: memoryview) -> list[bytes]:
    return [chunk_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
