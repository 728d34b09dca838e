"""Directories of the token cache: written under a temporary name and renamed, so that each is complete or absent."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.errors import DataError
from fsdp_shard.utils import atomic_directory

T = TypeVar("T")

_LEFTOVER_SECONDS = 24 * 3600  # a run writes more often than that


def cached(directory: Path, read: Callable[[Path], T | None], write: Callable[[Path], None]) -> T:
    """Read a directory of the cache, or write it first if it is absent or incomplete.

    Args:
        directory: The directory.
        read: Reads a directory; returns None if it is absent or incomplete.
        write: Writes into a temporary directory, which is then renamed.

    Raises:
        DataError: The cache cannot be written.
    """
    if (known := read(directory)) is not None:
        return known
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory.parent)
        with atomic_directory(directory) as temporary:
            write(temporary)
            if directory.exists() and read(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise DataError(f"The token cache {directory} cannot be written ({error}); set data.cache_dir.") from error
    written = read(directory)
    assert written is not None, directory
    return written


def cache_key(parts: list[Any]) -> str:
    """Return the name of the directory for what `parts`, as JSON, identify."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def write_meta(directory: Path, version: int, values: Mapping[str, Any]) -> None:
    """Write meta.json and flush it to the disk."""
    with (directory / "meta.json").open("wb") as stream:
        stream.write(json.dumps({"format_version": version, **values}, indent=1).encode())
        flush(stream)


def read_meta(
    directory: Path, version: int, make: Callable[..., T], sizes: Callable[[T], Mapping[str, int]]
) -> T | None:
    """Read meta.json and check the sizes of the arrays.

    Args:
        directory: The directory.
        version: The format version to expect.
        make: Makes the result out of the values in meta.json.
        sizes: Returns the size of each array in bytes, by name.

    Returns:
        The result; None if the directory is absent, of another version, or incomplete.
    """
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if meta.pop("format_version") != version:
            return None
        found = make(**{**meta, "directory": str(directory)})
        is_complete = all((directory / f"{name}.bin").stat().st_size == size for name, size in sizes(found).items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if is_complete else None


def map_array(directory: str, name: str, dtype: str, size: int) -> npt.NDArray[Any]:
    """Memory-map an array [size], read-only; raise DataError if this process cannot see it."""
    file = Path(directory) / f"{name}.bin"
    try:
        return np.memmap(file, dtype=dtype, mode="r", shape=(size,))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be mapped ({error}); every rank must see the token cache. Set data.cache_dir to a "
            f"directory that all machines share."
        ) from error


def flush(stream: BinaryIO) -> None:
    """Flush a file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def batched(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items; each ends when the sum of their sizes reaches `limit`."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _remove_leftovers(cache: Path) -> None:
    """Delete what killed runs left behind, by its age: machines that share the cache share no lock."""
    for entry in cache.glob(".*.partial"):
        with suppress(OSError):  # it may be finished by now, or belong to another user
            changed = max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
            if time.time() - changed > _LEFTOVER_SECONDS and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
