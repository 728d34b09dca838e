"""Writes files and directories that appear complete or not at all, and on request survive a power cut."""

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils.secrets import redact
from fsdp_shard.utils.text import refuse_remote

RESULT, ERROR = "result.json", "error.txt"  # of a run: its figures, or the error that ended it


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replace the content of a small file in one step: readers see either the old or the new content, never a part.

    Args:
        path: The file. Its directory must exist.
        content: The new content; text is written as UTF-8.
        sync: Wait until content and name are on disk, so they also survive a power cut.

    Raises:
        OSError: The file could not be written, and is unchanged.
    """
    # The process ID separates commands that write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_file(temporary, content, sync=sync)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_path(path.parent)


def has_content(file: Path, content: bytes) -> bool:
    """Whether the file exists and has this content."""
    return file.is_file() and file.stat().st_size == len(content) and file.read_bytes() == content


def nearest_existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which is on the same file system."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def check_writable(directory: str | os.PathLike[str], setting: str) -> None:
    """Check that files can be written to a directory that may not exist yet, without leaving any.

    Args:
        directory: The directory.
        setting: Its setting, as `name=value`, for errors.

    Raises:
        ConfigError: A parent of the directory is a file or not writable.
    """
    existing = nearest_existing(Path(directory).expanduser())
    if not existing.is_dir():
        raise ConfigError(f"{setting} cannot be written: {existing} is a file, not a directory; give another one.")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{setting} cannot be written: {reason} in {existing}; give another directory.") from error


def write_result(run_dir: str | os.PathLike[str], figures: Mapping[str, Any]) -> Path:
    """Write RUN_DIR/result.json, with `"status": "completed"`. Write it last: if it exists, the run has completed.

    Args:
        run_dir: Directory of the run, created if it does not exist.
        figures: Results of the run; numbers must be finite.

    Returns:
        Path of the file.

    Raises:
        ConfigError: The directory is a remote address, or the figures have a `status`.
        ValueError, TypeError: A figure is not finite, or cannot be written as JSON.

    Example:
        >>> fs.write_result(config.run_dir, {"perplexity": 15.06})  # doctest: +SKIP
    """
    refuse_remote(run_dir, "run_dir", "give a local directory.")
    if "status" in figures:
        raise ConfigError(f"The figures have a status={figures['status']!r} of their own; give it another name.")
    path = Path(run_dir) / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"status": "completed", **figures}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, redact(text))
    return path


def write_file(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write a small file in place; with `sync`, return only when its content is on disk."""
    with name_in_errors(path), open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` if the block succeeds, and deleted if it fails.

    If another process has created `target` in the meantime, that directory is kept and this one is deleted.

    Raises:
        OSError: The directory could not be created or renamed.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def try_lock(descriptor: int, kind: int) -> bool:
    """Try to lock an open file (flock); return True also if the file system has no locks.

    Args:
        descriptor: The file.
        kind: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def hold_lock(file: Path) -> int:
    """Create a file that stays locked until this process and its forks have ended, or its descriptor is closed.

    Returns:
        The descriptor.

    Raises:
        OSError: The file could not be created.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.new")  # never visible under its name without the lock
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: files of killed processes are then kept
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(new, file)
    return descriptor


def is_abandoned(file: Path) -> bool:
    """Whether a file was locked by `hold_lock` for this user, and its processes have ended; False if unknown."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to an OSError of a call with only a descriptor, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_path(path: Path) -> None:
    """Flush a file's content or a directory's names to disk, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
