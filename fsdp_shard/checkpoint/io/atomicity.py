"""Making files and directories appear whole or not at all, and stay after a power cut. Knows nothing of checkpoints."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import glob
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_shard.errors import SaveError
from fsdp_shard.utils import format_size

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SYNC_FILE_RANGE_WRITE = 2


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of a call that knows a descriptor only, such as a write to a full disk, name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_file(path: Path) -> None:
    """Force a file's content to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Force the names in a directory to the disk: a rename is lasting only after this."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Let the kernel begin to write a range to the disk, without waiting: the fsync at the end finds little to do.

    A hint (sync_file_range, Linux); nothing elsewhere, and no error is one.
    """
    if (function := _of_libc("sync_file_range")) is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def allocate(descriptor: int, num_bytes: int) -> None:
    """Set the size of a new file and have its blocks set aside, where the file system can (fallocate, Linux).

    A full disk is an OSError now and not after half of the writing, and the writing takes a quarter less time
    (docs/decisions.md).
    """
    os.truncate(descriptor, num_bytes)
    if num_bytes and (function := _of_libc("fallocate")) is not None:
        while function(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


@functools.cache
def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform.startswith("linux") else None


def make_directories(path: Path) -> None:
    """Make `path`, which must not be there, and the directories above it; the names of those are on the disk then."""
    missing = [above for above in path.parents if not above.exists()]
    path.mkdir(parents=True)
    for made in missing:
        fsync_directory(made.parent)


def fsync_tree(path: Path) -> None:
    """Force the names in a directory and in all below it to the disk; their files are synced by who wrote them."""
    for directory, _, _ in os.walk(path):
        fsync_directory(Path(directory))


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and have it on the disk."""
    with naming(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Replace a small file: readers see the old content or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.partial")
    write_file(temporary, text.encode())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def move_directory(source: Path, target: Path, *, replace: bool, sync: bool = True) -> None:
    """Rename a finished directory to `target`, in the same parent directory, which is then synced (with `sync`).

    With `replace` a directory that is there is replaced in one step and then deleted; without, it is an OSError, unless
    it is empty. Where the file system cannot exchange two names, the old directory is moved to `.NAME.replaced` for an
    instant; `recover` puts it back after a crash there.
    """
    if not replace or not target.exists() or _is_empty(target):
        os.rename(source, target)  # fails where something is in the way, also if it has come only now
        if sync:
            fsync_directory(target.parent)
        return
    assert sync, "what is replaced would be lost in a power cut"
    if _exchange(source, target):
        fsync_directory(target.parent)
        shutil.rmtree(source)
        return
    old = replaced_name(target)
    os.rename(target, old)
    os.rename(source, target)
    fsync_directory(target.parent)
    shutil.rmtree(old)


def replaced_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def recover(target: Path) -> None:
    """Undo a `move_directory` that a crash cut short between its two renames: put the old directory back."""
    old = replaced_name(target)
    if old.is_dir() and not target.exists():
        os.rename(old, target)
        fsync_directory(target.parent)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once (renameat2, Linux); False where that is not possible."""
    function = _of_libc("renameat2")
    if function is None:
        return False
    result = function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(result == 0)


@contextmanager
def new_directory(target: Path, num_bytes: int, *, replace: bool, sync: bool = True) -> Iterator[Path]:
    """A temporary directory beside `target`, which takes its name if the block succeeds and vanishes if not.

    Without `replace`, a directory that has come to `target` in the meantime stays, and that is a SaveError. Without
    `sync` (which `replace` needs) when its name gets to the disk is left to the system.
    It is locked while it is in use, so that the next conversion can tell it from what a killed one left, and delete it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise SaveError(
                f"{target.parent} has {format_size(free)} free, but {target.name} takes {format_size(num_bytes)}; "
                "free some space or give another target. Nothing was written."
            )
        temporary = target.parent / f".{target.name}.partial-{uuid.uuid4().hex}"
        temporary.mkdir()
    except OSError as error:
        raise SaveError(f"{target} cannot be created: {error.strerror}.") from error
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        move_directory(temporary, target, replace=replace, sync=sync)
    except OSError as error:
        raise SaveError(f"{target} could not be written: {error.strerror or error}; nothing of it was kept.") from error
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    for entry in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if entry.is_symlink() or not entry.is_dir():
            continue  # not one of ours
        lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # another conversion is writing it
        finally:
            os.close(lock)
        shutil.rmtree(entry, ignore_errors=True)
