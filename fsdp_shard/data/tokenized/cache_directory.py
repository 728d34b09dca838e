"""Directories of the token cache: written beside their place and renamed, so that each is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsdp_shard.errors import DataError

T = TypeVar("T")

_WRITING = ".writing-"
_LEFT_SECONDS = 24 * 3600  # no run goes so long without writing


def cached(directory: Path, read: Callable[[Path], T | None], write: Callable[[Path], None]) -> T:
    """What `read` makes of `directory`; when it is not there or not whole, `write` makes it, under another name first.

    Raises DataError when the cache cannot be written.
    """
    if (known := read(directory)) is not None:
        return known
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory.parent)
        temporary = Path(tempfile.mkdtemp(prefix=_WRITING, dir=directory.parent))
    except OSError as error:
        raise DataError(
            f"The token cache {directory.parent} cannot be written ({error}); set data.cache_dir."
        ) from error
    try:
        write(temporary)
        _put_in_place(temporary, directory, read)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    written = read(directory)
    assert written is not None, directory
    return written


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write `values` and flush them to the disk."""
    with file.open("w", encoding="utf-8") as stream:
        json.dump(values, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _remove_leftovers(cache: Path) -> None:
    """Delete what a run was writing that was killed, by its age: other machines may share the cache, but no lock."""
    for entry in cache.glob(f"{_WRITING}*"):
        with suppress(OSError):  # it may be done by now, or somebody else's
            changed = max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
            if time.time() - changed > _LEFT_SECONDS and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)


def _put_in_place(temporary: Path, directory: Path, read: Callable[[Path], Any]) -> None:
    """Rename, unless another run was faster; a damaged leftover in the way is removed."""
    if directory.exists() and read(directory) is None:
        shutil.rmtree(directory, ignore_errors=True)
    os.umask(umask := os.umask(0))
    try:
        temporary.chmod(0o777 & ~umask)  # made for its owner alone, and others may share the cache
        temporary.rename(directory)
    except OSError as error:
        if read(directory) is None:
            raise DataError(
                f"{directory} of the token cache cannot be replaced ({error}); set data.cache_dir."
            ) from error
