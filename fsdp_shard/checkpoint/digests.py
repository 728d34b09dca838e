"""Digests of tensors that do not depend on how the tensor is split, and of the bytes around them.

A tensor's digest is a tree of two levels: xxh3_128 over its dtype, its shape and the xxh3_128 of each CHUNK_BYTES of
its logical bytes (row-major, little-endian). So the same weights have the same digest in every layout and format,
chunks can be hashed in any order by whoever has them, and damage is found to within one chunk. Detects accidents, not
forgery: xxh3 is no cryptographic hash. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.index import TensorEntry, TensorIndex
from fsdp_shard.checkpoint.io.dtypes import itemsize
from fsdp_shard.checkpoint.io.files import open_regular, page_aligned
from fsdp_shard.checkpoint.steps.manifest import FileRecord

CHUNK_BYTES = 1 << 20
"""Logical bytes of a chunk. Part of the digest: changing it changes every digest (see docs/decisions.md)."""


def chunk_digest(data: Any) -> bytes:
    """The digest of one chunk (any buffer), 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def tensor_digest(dtype: str, shape: Sequence[int], chunk_digests: Sequence[bytes]) -> str:
    """The digest of a tensor, 32 hex digits, from those of its chunks in order."""
    start = f"{dtype} {','.join(map(str, shape))}\0".encode()
    return xxhash.xxh3_128_hexdigest(start + b"".join(chunk_digests))


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def read_chunks(index: TensorIndex, name: str, numbers: Iterable[int] | None = None) -> Iterator[memoryview]:
    """The logical bytes of a tensor chunk by chunk (all, or those numbered `numbers`), each in the same buffer."""
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    whole = page_aligned(min(CHUNK_BYTES, entry.num_bytes))
    for number in range(num_chunks(entry.num_bytes)) if numbers is None else numbers:
        start = number * CHUNK_BYTES
        view = whole[: min(CHUNK_BYTES, entry.num_bytes - start)]
        index.read_into(name, start // size, view)
        yield view


def digest_chunks(index: TensorIndex, name: str, chunks: Sequence[int] | None = None) -> Iterator[bytes]:
    """Read a tensor through the index and yield the digests of its chunks (all, or those numbered `chunks`)."""
    return map(chunk_digest, read_chunks(index, name, chunks))


def digest_tensor(index: TensorIndex, name: str) -> str:
    """The digest of the logical bytes of tensor `name`, computed by reading them; 32 hex digits."""
    entry = index.entry(name)
    return tensor_digest(entry.dtype, entry.shape, list(digest_chunks(index, entry.name)))


def describe_chunk(index: TensorIndex, name: str, number: int) -> str:
    """`FILE, tensor NAME, bytes 0-1048575` of chunk `number` (see `integrity`), for messages."""

    entry = index.entry(name)
    size = itemsize(entry.dtype)
    stop = min((number + 1) * CHUNK_BYTES, entry.num_bytes)
    places = index.places(name, number * CHUNK_BYTES // size, stop // size)
    where = " and ".join(f"{index.root / span.file} (bytes {span.start}-{span.stop - 1})" for span in places[:3])
    return f"{where}: tensor {name}, its bytes {number * CHUNK_BYTES}-{stop - 1},"


class RangeHasher:
    """Hashes the flat byte range [start, stop) of a tensor of `num_bytes` as it is written, in pieces of any size.

    `digests` collects the chunks that begin in the range. The last may end in another rank's: then `rest` are the bytes
    that are still needed for it, to be read once all ranks have written, and given to `finish` piece by piece.
    """

    def __init__(self, num_bytes: int, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= num_bytes
        self.digests: dict[int, bytes] = {}
        self._num_bytes, self._position, self._start, self._stop = num_bytes, start, start, stop
        self._hasher = xxhash.xxh3_128()

    @property
    def rest(self) -> range:
        """The bytes behind the range of the chunk that begins in it and ends there; mostly none."""
        number = self._stop // CHUNK_BYTES
        begins_here = self._start <= number * CHUNK_BYTES < self._stop
        return range(self._stop, self._end(number)) if begins_here else range(0)

    def update(self, data: Any) -> None:
        """The next bytes of the range."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        assert self._position + len(view) <= self._stop
        self._hash(view)

    def finish(self, piece: memoryview) -> None:
        """The next bytes of what `rest` asks for, after all of the range."""
        assert self._position >= self._stop
        self._hash(piece)

    def _hash(self, view: memoryview) -> None:
        while len(view):
            number = self._position // CHUNK_BYTES
            end = self._end(number)
            part = view[: end - self._position]
            if begins_here := number * CHUNK_BYTES >= self._start:
                self._hasher.update(part)
            self._position += len(part)
            if self._position == end and begins_here:
                self.digests[number] = self._hasher.digest()
                self._hasher.reset()
            view = view[len(part) :]

    def _end(self, number: int) -> int:
        return min((number + 1) * CHUNK_BYTES, self._num_bytes)


def file_digest(path: Path) -> str:
    """The digest of a whole file, 32 hex digits: for the small files beside the weights."""
    hasher = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb") as file:
        while data := file.read(CHUNK_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


def header_digest(path: Path) -> str:
    """The digest of a safetensors file's first bytes, up to where its tensors begin."""
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        return chunk_digest(start + file.read(min(length, 1 << 30))).hex()


def frame_digest(path: Path, owned: Iterable[tuple[int, int]]) -> str:
    """The digest of a weight file's bytes that no tensor owns, in file order; `owned` are the ranges [start, stop) of
    tensors.

    Of a safetensors file that is its header: then it equals `header_digest`. It is what manifests record as such.
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
    """The manifest's record of a file whose bytes no tensor digest covers."""
    return FileRecord(path.stat().st_size, digest=file_digest(path))


def jobs_of(index: TensorIndex, names: Collection[str]) -> Iterator[tuple[TensorEntry, range]]:
    """The chunks of the tensors `names`, some at a time."""
    for entry in index.tensors.values():
        if entry.name in names:
            total = num_chunks(entry.num_bytes)
            for first in range(0, total, _JOB_CHUNKS):
                yield entry, range(first, min(first + _JOB_CHUNKS, total))


_JOB_CHUNKS = 32  # a thread takes no more at once, so that one large tensor is shared by all
