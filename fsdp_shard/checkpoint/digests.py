"""Digests of tensors, independent of how they are split into files, and of the bytes around them.

A tensor's digest is a tree of two levels: xxh3_128 over its dtype, its shape and the xxh3_128 of each CHUNK_BYTES of
its logical bytes (row-major, little-endian). The same weights therefore have the same digest in every layout and
format, any rank can hash chunks in any order, and damage is located to within one chunk. Digests detect accidents, not
forgery: xxh3 is not a cryptographic hash.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import TensorSpec, itemsize, page_aligned
from fsdp_shard.checkpoint.steps.file_plan import FilePlan
from fsdp_shard.checkpoint.steps.manifest import FileRecord, TensorRecord
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.utils import limits, open_regular

CHUNK_BYTES = 1 << 20
"""Logical bytes of a chunk. Part of the digest: changing it changes every digest (see docs/decisions.md)."""
SMALL_BYTES = 64 << 10
"""A tensor up to this size is hashed by one rank; in a save, the other ranks send it their parts."""
JOB_CHUNKS = 32  # lets several threads work on one large tensor


def chunk_digest(data: Any) -> bytes:
    """Return the digest of one chunk (any buffer), 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def tensor_digest(dtype: str, shape: Sequence[int], chunk_digests: Sequence[bytes]) -> str:
    """Return the digest of a tensor, 32 hex digits, from those of its chunks in order."""
    start = f"{dtype} {','.join(map(str, shape))}\0".encode()
    return xxhash.xxh3_128_hexdigest(start + b"".join(chunk_digests))


def num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a tensor."""
    return -(-num_bytes // CHUNK_BYTES)


def read_chunks(index: TensorIndex, name: str, numbers: Iterable[int] | None = None) -> Iterator[memoryview]:
    """Read a tensor chunk by chunk (all, or those numbered `numbers`), each into the same buffer."""
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    whole = page_aligned(min(CHUNK_BYTES, entry.num_bytes))
    for number in range(num_chunks(entry.num_bytes)) if numbers is None else numbers:
        start = number * CHUNK_BYTES
        view = whole[: min(CHUNK_BYTES, entry.num_bytes - start)]
        index.read_into(name, start // size, view)
        yield view


def read_chunk_digests(index: TensorIndex, name: str, chunks: Sequence[int] | None = None) -> Iterator[bytes]:
    """Read a tensor through the index and yield the digests of its chunks (all, or those numbered `chunks`)."""
    return map(chunk_digest, read_chunks(index, name, chunks))


def describe_chunk(index: TensorIndex, name: str, number: int) -> str:
    """Describe a chunk of a tensor and where it is stored, for messages: `FILE (bytes 8-71): tensor NAME, ...`."""
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    stop = min((number + 1) * CHUNK_BYTES, entry.num_bytes)
    spans = index.spans(name, number * CHUNK_BYTES // size, stop // size)
    where = " and ".join(f"{index.root / span.file} (bytes {span.start}-{span.stop - 1})" for span in spans[:3])
    return f"{where}: tensor {name}, its bytes {number * CHUNK_BYTES}-{stop - 1},"


def complete_chunk_digests(data: memoryview, start: int, num_bytes: int) -> dict[int, bytes]:
    """Return the digests of the chunks that lie completely in `data`, a part of a tensor.

    Args:
        data: Logical bytes of the tensor.
        start: Position of the first one in the tensor.
        num_bytes: Size of the tensor, where its last chunk ends.

    Returns:
        {chunk number: digest}, in order.
    """
    stop = start + len(data)
    last = num_chunks(stop) if stop == num_bytes else stop // CHUNK_BYTES
    firsts = {number: number * CHUNK_BYTES - start for number in range(num_chunks(start), last)}
    return {number: chunk_digest(data[first : first + CHUNK_BYTES]) for number, first in firsts.items()}


def file_digest(path: Path) -> str:
    """Return the digest of a whole file, 32 hex digits; for small files that are not weights."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def header_digest(path: Path) -> str:
    """Return the digest of a safetensors file's first bytes, up to where its tensors begin."""
    with os.fdopen(open_regular(path), "rb") as file:
        hasher = xxhash.xxh3_128(start := file.read(8))
        hasher.update(file.read(min(int.from_bytes(start, "little"), limits().metadata_bytes)))
    return hasher.hexdigest()


def frame_digest(path: Path, owned: Iterable[tuple[int, int]]) -> str:
    """Return the digest of a weight file's bytes outside the `owned` ranges [start, stop) of tensors, in file order.

    For a safetensors file these bytes are the header, so that it equals `header_digest`; manifests record it under that
    name.
    """
    hasher, position = xxhash.xxh3_128(), 0
    with os.fdopen(open_regular(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        for start, stop in [*sorted(owned), (end, end)]:
            file.seek(position)
            while position < start and (data := file.read(min(CHUNK_BYTES, start - position))):
                hasher.update(data)
                position += len(data)
            position = max(position, stop)
    return hasher.hexdigest()


def record_file(path: Path) -> FileRecord:
    """Return the manifest record of a file that no tensor digest covers."""
    return FileRecord(path.stat().st_size, digest=file_digest(path))


def record_plan(plan: FilePlan) -> FileRecord:
    """Return the manifest record of a planned file, whose tensors have their own digests."""
    return FileRecord(plan.num_bytes, header_digest=chunk_digest(plan.header).hex())


def record_tensor(spec: TensorSpec, chunks: Mapping[int, bytes]) -> TensorRecord:
    """Return the manifest record of a tensor from the digests of all of its chunks by number, in any order."""
    assert sorted(chunks) == list(range(num_chunks(spec.num_bytes))), f"chunks of {spec.name} are missing"
    ordered = [chunks[number] for number in sorted(chunks)]
    digest = tensor_digest(spec.dtype, spec.shape, ordered)
    return TensorRecord(spec.dtype, spec.shape, digest, tuple(chunk.hex() for chunk in ordered))


def chunk_jobs(index: TensorIndex, names: Collection[str]) -> Iterator[tuple[TensorEntry, range]]:
    """Yield the numbers of the chunks of tensors, in groups for threads to work on."""
    for entry in index.tensors.values():
        if entry.name in names:
            total = num_chunks(entry.num_bytes)
            for first in range(0, total, JOB_CHUNKS):
                yield entry, range(first, min(first + JOB_CHUNKS, total))
