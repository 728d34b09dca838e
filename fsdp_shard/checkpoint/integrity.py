"""Digests of tensors that do not depend on how the tensor is split, and checking a checkpoint against them.

A tensor's digest is a tree of two levels: xxh3_128 over its dtype, its shape and the xxh3_128 of each CHUNK_BYTES of
its logical bytes (row-major, little-endian). So the same weights have the same digest in every layout and format,
chunks can be hashed in any order by whoever has them, and damage is found to within one chunk. Detects accidents, not
forgery: xxh3 is no cryptographic hash. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from fsdp_shard.checkpoint.dtypes import itemsize
from fsdp_shard.checkpoint.files import member, open_regular
from fsdp_shard.checkpoint.manifest import FileRecord, Manifest, read_manifest
from fsdp_shard.errors import CheckpointError
from fsdp_shard.sizes import format_size

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.index import TensorIndex

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


def digest_chunks(index: TensorIndex, name: str, chunks: Sequence[int] | None = None) -> Iterator[bytes]:
    """Read a tensor through the index and yield the digests of its chunks (all, or those numbered `chunks`)."""
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.num_bytes)))
    for number in range(num_chunks(entry.num_bytes)) if chunks is None else chunks:
        start = number * CHUNK_BYTES
        view = buffer[: min(CHUNK_BYTES, entry.num_bytes - start)]
        index.read_into(name, start // size, view)
        yield chunk_digest(view)


class RangeHasher:
    """Hashes the flat byte range [start, stop) of a tensor of `num_bytes` as it is written, in pieces of any size.

    `digests` collects the chunks that lie wholly in the range; `missing` are the numbers of those that it only touches,
    to be read back through the index once all ranks have written.
    """

    def __init__(self, num_bytes: int, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= num_bytes
        self.digests: dict[int, bytes] = {}
        self._num_bytes, self._position, self._start, self._stop = num_bytes, start, start, stop
        self._hasher = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """The next bytes of the range."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while len(view):
            number = self._position // CHUNK_BYTES
            end = min((number + 1) * CHUNK_BYTES, self._num_bytes)
            part = view[: end - self._position]
            if self._is_whole(number):
                self._hasher.update(part)
            self._position += len(part)
            assert self._position <= self._stop
            if self._position == end and self._is_whole(number):
                self.digests[number] = self._hasher.digest()
                self._hasher.reset()
            view = view[len(part) :]

    def _is_whole(self, number: int) -> bool:
        low, high = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self._num_bytes)
        return self._start <= low and high <= self._stop

    @property
    def missing(self) -> list[int]:
        """Chunks that the range touches without holding them whole: at most two."""
        if self._start == self._stop:
            return []
        touched = range(self._start // CHUNK_BYTES, num_chunks(self._stop))
        return [number for number in touched if not self._is_whole(number)]


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


def record_file(path: Path) -> FileRecord:
    """The manifest's record of a file whose bytes no tensor digest covers."""
    return FileRecord(path.stat().st_size, digest=file_digest(path))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `start` and `stop` are bytes in the file, where the damage could be narrowed down."""

    message: str
    file: str | None = None
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class VerifyReport:
    """`content_checked` is False where there was no manifest to compare with: then only the structure was checked."""

    path: str
    format: str | None
    num_tensors: int
    num_bytes: int
    content_checked: bool
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        """For a terminal: a line a problem, then what was checked."""
        size = f"{self.num_tensors:,} tensors, {format_size(self.num_bytes)}"
        if self.content_checked:
            checked = f"every byte was compared with its digest in {self.seconds:.1f} s"
        else:
            checked = "only the structure was checked: there is no manifest with digests to compare the content with"
        lines = [problem.message for problem in self.problems]
        if self.format is not None:
            lines.append(f"{self.path}: {'DAMAGED' if self.problems else 'sound'} ({size}; {checked}).")
        return "\n".join(lines)


def verify(path: str | Path) -> VerifyReport:
    """Check a checkpoint: its structure, and every byte against the digests of its manifest where it has one.

    Raises nothing for a damaged checkpoint: all that is wrong is in `problems`, each with file, tensor and bytes. Only
    a path where there is nothing at all is a CheckpointError.
    """
    from fsdp_shard.checkpoint import store
    from fsdp_shard.checkpoint.index import open_checkpoint

    start = time.perf_counter()
    if not Path(path).exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint file, a directory, or a run directory.")
    problems: list[Problem] = []
    manifest: Manifest | None = None
    index: TensorIndex | None = None
    try:
        place = store.resolve(Path(path))
        manifest = read_manifest(place) if place.is_dir() else None
        if manifest is not None:
            problems += _file_problems(place, manifest)
        index = open_checkpoint(place)
        if manifest is not None:
            problems += _content_problems(index, manifest)
    except (CheckpointError, OSError) as error:
        if not problems:  # else the file that is behind it is named already
            problems.append(Problem(str(error)))
    finally:
        if index is not None:
            index.close()
    return VerifyReport(
        path=str(path),
        format=index.format if index else None,
        num_tensors=len(index.tensors) if index else 0,
        num_bytes=index.num_bytes if index else 0,
        content_checked=manifest is not None and index is not None,
        seconds=time.perf_counter() - start,
        problems=tuple(problems),
    )


def _file_problems(root: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, record in manifest.files.items():
        try:
            path = member(root, name)
            size = path.stat().st_size
            if size != record.size:
                yield Problem(f"{path} has {size} bytes, but {record.size} were written.", name)
            elif record.digest is not None and file_digest(path) != record.digest:
                yield Problem(f"{path} does not have the content that was written.", name, None, 0, size)
            elif record.header_digest is not None and header_digest(path) != record.header_digest:
                yield Problem(f"the header of {path} is not the one that was written.", name)
        except CheckpointError as error:
            yield Problem(str(error), name)


def _content_problems(index: TensorIndex, manifest: Manifest) -> list[Problem]:
    from fsdp_shard.checkpoint.transfer import in_threads

    problems: list[Problem] = []

    def work(names: Iterator[str]) -> None:
        for name in names:
            problems.extend(_tensor_problems(index, name, manifest.tensors[name].chunks))

    in_threads(work, index.names)
    return sorted(problems, key=lambda problem: (problem.file or "", problem.start or 0))


def _tensor_problems(index: TensorIndex, name: str, expected: Sequence[str]) -> Iterator[Problem]:
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    for number, found in enumerate(digest_chunks(index, name)):
        if found.hex() == expected[number]:
            continue
        stop = min((number + 1) * CHUNK_BYTES, entry.num_bytes)
        places = index.places(name, number * CHUNK_BYTES // size, stop // size)
        for file, low, high in places:
            others = [other for other, *_ in places if other != file]
            doubt = f", here or in {' or '.join(others)}" if others else ""
            yield Problem(
                f"{index.root / file}: bytes {low}-{high - 1}, of tensor {name}, are not what was written{doubt}.",
                file,
                name,
                low,
                high,
            )
