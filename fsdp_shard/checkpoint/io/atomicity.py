"""Directories that appear complete or not at all and survive a power cut, and kernel hints for large files."""

import ctypes
import errno
import functools
import glob
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_shard.errors import SaveError, StorageError
from fsdp_shard.utils import format_size, fsync_path, hold_lock, is_abandoned

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SYNC_FILE_RANGE_WRITE = 2
_LOCK = ".lock"


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Ask the kernel to start writing a range to disk, without waiting, so the final fsync has little left to do.

    Only a hint (sync_file_range): it never fails.
    """
    if (function := _libc_function("sync_file_range")) is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def allocate(descriptor: int, num_bytes: int) -> None:
    """Set the size of a new file and reserve its blocks, if the file system can (fallocate).

    A full disk then raises OSError now rather than midway, and writing takes a quarter less time
    (docs/benchmarks.md#behind-the-decisions). Where a file system cannot, `os.posix_fallocate` would write zeros.
    """
    os.truncate(descriptor, num_bytes)
    if num_bytes and (function := _libc_function("fallocate")) is not None:
        while function(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


@functools.cache
def _libc_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def require_space(directory: Path, num_bytes: int, what: str, advice: str) -> None:
    """Raise StorageError if the disk of `directory` has less than `num_bytes` free for `what`."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StorageError(
            f"{directory} has {format_size(free)} free, but {what} takes {format_size(num_bytes)}; free some space, or "
            f"{advice}. Nothing was written (ENOSPC)."
        )


def make_directories(path: Path) -> None:
    """Create `path`, which must not exist, and its parents, and sync the names of new parents to disk."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True)
    for made in missing:
        fsync_path(made.parent)


def sync_directories(path: Path) -> None:
    """Flush the names in a directory and all below it to disk; writers sync their own files."""
    for directory, _, _ in os.walk(path):
        fsync_path(Path(directory))


def move_directory(source: Path, target: Path, *, replace: bool, sync: bool = True) -> None:
    """Rename a finished directory to `target`, in the same parent directory.

    Args:
        source: The finished directory.
        target: Its final name. Without `replace`, a non-empty directory there raises OSError.
        replace: Replace a directory at `target` in one step and then delete it. If the file system cannot exchange two
            names, the old directory is renamed to `.NAME.replaced` for an instant; `recover` restores it after a crash.
        sync: Wait until the new name is on disk. `replace` needs it.
    """
    if not replace or not target.exists() or _is_empty(target):
        os.rename(source, target)  # also fails if something was just created there
        if sync:
            fsync_path(target.parent)
        return
    assert sync, "a power cut could lose the directory that is replaced"
    old = source
    if not _exchange(source, target):
        old = _replaced_name(target)
        if os.path.lexists(old):
            raise FileExistsError(errno.EEXIST, f"{old} is left of an earlier replacement; delete it", str(old))
        os.rename(target, old)
        os.rename(source, target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)  # the new one is in place; NFS keeps files that are still open


def recover(target: Path) -> None:
    """Undo a `move_directory` that a crash interrupted between its two renames: restore the old directory."""
    old = _replaced_name(target)
    if old.is_dir() and not old.is_symlink() and not os.path.lexists(target):
        os.rename(old, target)
        fsync_path(target.parent)


def _replaced_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (renameat2); return False if that is impossible."""
    function, names = _libc_function("renameat2"), [os.fsencode(path) for path in (one, other)]
    return function is not None and function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


@contextmanager
def new_directory(target: Path, num_bytes: int, *, replace: bool, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary directory next to `target`, which is renamed to it on success and deleted on failure.

    A locked file next to it shows its owner: only directories left by killed processes are deleted.

    Args:
        target: The final name.
        num_bytes: Free disk space that is required.
        replace: Replace a directory at `target`. Otherwise, a directory created there in the meantime is kept.
        sync: Wait until the final name is on disk (`replace` needs it); otherwise, the system writes it later.

    Raises:
        SaveError: The directory cannot be created, written or renamed, or the disk has too little space.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        require_space(target.parent, num_bytes, target.name, "give another target")
        temporary = target.parent / f".{target.name}.partial-{uuid.uuid4().hex}"
        held = hold_lock(lock := temporary.with_name(f"{temporary.name}{_LOCK}"))
    except OSError as error:
        raise SaveError(f"{target} cannot be created: {error.strerror}.") from error
    try:
        temporary.mkdir()
        yield temporary
        move_directory(temporary, target, replace=replace, sync=sync)
    except OSError as error:
        raise SaveError(f"{target} could not be written: {error.strerror or error}; nothing of it was kept.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(held)


def _remove_leftovers(target: Path) -> None:
    """Delete leftovers of killed processes; directories without a lock file of `new_directory` are not ours."""
    for lock in target.parent.glob(f".{glob.escape(target.name)}.partial-*{_LOCK}"):
        directory = lock.with_suffix("")
        is_ours = re.search(r"-[0-9a-f]{32}$", directory.name) and not directory.is_symlink()
        if not is_ours or not is_abandoned(lock):
            continue
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
