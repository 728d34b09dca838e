"""Directories of the token cache: written under a temporary name and renamed, so that each is complete or absent."""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.errors import DataError
from fsdp_shard.utils import atomic_directory

_LEFTOVER_SECONDS = 24 * 3600  # a run writes more often than that


def cached(directory: Path, write: Callable[[Path], TokenFile]) -> TokenFile:
    """Read a directory of the cache, or write it first if it is absent or incomplete.

    Args:
        directory: The directory.
        write: Writes the files into a temporary directory, which is then renamed.

    Raises:
        DataError: The cache cannot be written.
    """
    if (known := TokenFile.read(directory)) is not None:
        return known
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory.parent)
        with atomic_directory(directory) as temporary:
            write(temporary).write_meta()
            for file in temporary.iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            if directory.exists() and TokenFile.read(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise DataError(f"The token cache {directory} cannot be written ({error}); set data.cache_dir.") from error
    written = TokenFile.read(directory)
    assert written is not None, directory
    return written


def cache_key(parts: list[Any]) -> str:
    """Return the name of the directory for what `parts`, as JSON, identify."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _remove_leftovers(cache: Path) -> None:
    """Delete what killed runs left behind, by its age: machines that share the cache share no lock."""
    for entry in cache.glob(".*.partial"):
        with suppress(OSError):  # it may be finished by now, or belong to another user
            changed = max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
            if time.time() - changed > _LEFTOVER_SECONDS and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
