"""A step directory against its own manifest, before a run goes on from it or after it was saved: all of it, or refused.

`check_files` is cheap: every file there, of the right size, and the small ones as written. `check_content` reads all
bytes, a share of them on each rank. Both raise at the first thing that is wrong. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fsdp_shard.checkpoint.digests import (
    CHUNK_BYTES,
    describe_chunk,
    digest_chunks,
    file_digest,
    header_digest,
    jobs_of,
)
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io.files import member, open_regular
from fsdp_shard.checkpoint.io.thread_pool import in_threads
from fsdp_shard.checkpoint.open_local import open_local
from fsdp_shard.checkpoint.steps.manifest import FileRecord, Manifest, read_manifest
from fsdp_shard.errors import CheckpointError

_SMALL_BYTES = 16 << 20

Job = tuple[int, Callable[[], None]]  # bytes to read, and what reads them


def check_files(directory: Path) -> Manifest:
    """The manifest of a step, when each of its files is there in full; CheckpointError naming the first that is not.

    Small files are compared with their digests at once: config, tokenizer and trainer's state are read before the rest.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(f"{directory} has no manifest of fsdp-shard, so nothing says what it must hold.")
    for name, record in manifest.files.items():
        path = member(directory, name)
        if (size := path.stat().st_size) != record.size:
            raise CheckpointError(
                f"{path} has {size} bytes, but {record.size} were written: the checkpoint is damaged."
            )
        if record.digest is not None and size <= _SMALL_BYTES:
            _check_file(path, record)
    return manifest


def check_content(directory: Path, share: int = 0, num_shares: int = 1) -> None:
    """Read the part numbered `share` of all bytes of a step; CheckpointError naming file and bytes that are damaged."""
    manifest = check_files(directory)
    with open_local(directory) as index:
        _check_names(index, manifest)
        jobs = [*_file_jobs(directory, manifest), *_tensor_jobs(index, manifest)]
        in_threads(_run, shares(jobs, num_shares)[share])


def drop_cache(directory: Path, manifest: Manifest) -> None:
    """Have what is read next come from the disk, as far as the system lets go of what is in memory."""
    for name in manifest.files:
        descriptor = open_regular(member(directory, name))
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def shares(jobs: Sequence[Job], num_shares: int) -> list[list[Job]]:
    """The jobs, divided so that all shares read about as much: the same on every rank."""
    found: list[list[Job]] = [[] for _ in range(num_shares)]
    sizes = [0] * num_shares
    for job in sorted(jobs, key=lambda job: -job[0]):  # keeps the order of equal ones
        least = sizes.index(min(sizes))
        found[least].append(job)
        sizes[least] += job[0]
    return found


def _run(jobs: Iterator[Job]) -> None:
    for _, check in jobs:
        check()


def _check_names(index: TensorIndex, manifest: Manifest) -> None:
    stored = {name: (entry.dtype, entry.shape) for name, entry in index.tensors.items()}
    written = {name: (record.dtype, record.shape) for name, record in manifest.tensors.items()}
    wrong = sorted({name for name, _ in stored.items() ^ written.items()})
    if wrong:
        raise CheckpointError(
            f"{index.root}: tensor {wrong[0]} in its files is not the one in its manifest ({len(wrong)} differ): the "
            "checkpoint is damaged."
        )


def _file_jobs(directory: Path, manifest: Manifest) -> Iterator[Job]:
    for name, record in manifest.files.items():
        if record.header_digest is not None or record.size > _SMALL_BYTES:
            yield record.size if record.digest else 0, partial(_check_file, member(directory, name), record)


def _check_file(path: Path, record: FileRecord) -> None:
    found = header_digest(path) if record.digest is None else file_digest(path)
    if found != (record.header_digest if record.digest is None else record.digest):
        what = "the header of " if record.digest is None else ""
        raise CheckpointError(f"{what}{path} is not what was written: the checkpoint is damaged.")


def _tensor_jobs(index: TensorIndex, manifest: Manifest) -> Iterator[Job]:
    for entry, numbers in jobs_of(index, manifest.tensors):
        expected = manifest.tensors[entry.name].chunks
        yield min(len(numbers) * CHUNK_BYTES, entry.num_bytes), partial(_check, index, entry.name, numbers, expected)


def _check(index: TensorIndex, name: str, numbers: range, expected: Sequence[str]) -> None:
    for number, digest in zip(numbers, digest_chunks(index, name, numbers), strict=True):
        if digest.hex() != expected[number]:
            where = describe_chunk(index, name, number)
            raise CheckpointError(f"{where} is not what was written: the checkpoint is damaged.")
