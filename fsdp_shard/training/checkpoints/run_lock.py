"""A lock on a run directory, so that two runs never write to the same one.

Rank 0 holds an advisory lock (flock) on RUN_DIR/.lock as long as its process lives. The system releases the lock
however the process ends, so it is never stale: processes that rank 0 forks, such as data workers, close their copy of
it. A save that outlives its run, as after an interrupt in a notebook, keeps the lock until it has ended. The lock is on
a file rather than the directory because on NFS other machines see only locks of files that are open for writing. The
content of the file is for people. On a file system without locks, other runs are not kept out (`doctor` warns).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import try_lock

if TYPE_CHECKING:
    from fsdp_shard.distributed import Communicator

LOCK = ".lock"

_held: set[int] = set()  # open files of this process whose locks no forked process may keep


class RunLock:
    """The lock of one run; on ranks other than 0 it locks nothing.

    Args:
        file: The locked file, as an absolute path.
        handle: Its open file; None if this rank holds no lock.
    """

    def __init__(self, file: Path = Path(LOCK), handle: int | None = None) -> None:
        self._file, self._handle = file, handle
        self._work: Future[Any] | None = None

    def release_after(self, work: Future[Any]) -> None:
        """Keep the lock until `work`, which writes to the run directory, has ended, even if the run ends before."""
        self._work = work

    def end(self) -> None:
        """Release the lock, now or when the work has ended."""
        if self._work is None:
            self._release()
        else:
            self._work.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        # Other ranks have no handle, and a forked process has closed its copy.
        if self._handle is not None and self._handle in _held:
            self._file.unlink(missing_ok=True)
            _held.remove(self._handle)
            os.close(self._handle)


@contextmanager
def run_lock(run_dir: str, ranks: Communicator) -> Iterator[RunLock]:
    """Lock `run_dir` against other runs within the block; raise ConfigError on all ranks if another run holds it."""
    path = Path(run_dir).absolute()
    handle = run_on_all(ranks, lambda: _acquire(Path(run_dir)) if ranks.is_main else None)
    lock = RunLock(path / LOCK, handle)
    try:
        yield lock
    finally:
        lock.end()


@contextmanager
def lock_directory(run_dir: str) -> Iterator[None]:
    """Lock `run_dir` within the block for a command without a group of ranks; ConfigError if another run holds it."""
    lock = RunLock(Path(run_dir).absolute() / LOCK, _acquire(Path(run_dir)))
    try:
        yield
    finally:
        lock.end()


@cache
def _close_in_forks() -> None:
    """Have forked processes close their copies of locked files, which would stay locked after this process's end."""

    def close() -> None:
        for handle in _held:
            os.close(handle)
        _held.clear()

    os.register_at_fork(after_in_child=close)


def holder(run_dir: Path) -> str | None:
    """Describe the run that holds the lock of `run_dir`; None if there is none. Changes nothing."""
    try:
        handle = os.open(run_dir / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(handle, fcntl.LOCK_SH) else _holder(run_dir)
    finally:
        os.close(handle)


def check_free(run_dir: str, *, may_join: bool) -> bool:
    """Check early, before anything is written, that `run_lock` will succeed. Changes nothing.

    Args:
        run_dir: The run directory.
        may_join: This command may join the run that has locked it, as in an elastic launch.

    Returns:
        Whether there is such a run to join.

    Raises:
        ConfigError: Another run has locked the directory.
    """
    other = holder(Path(run_dir))
    if other is not None and not may_join:
        raise _in_use(Path(run_dir), other)
    return other is not None


def _in_use(run_dir: Path, other: str) -> ConfigError:
    return ConfigError(
        f"run_dir={run_dir} is in use by another run ({other}); wait for it, stop it, or give another run_dir."
    )


def _acquire(run_dir: Path) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    while not _is_current(handle := _open(run_dir), run_dir):
        os.close(handle)  # the run that had it has just ended and deleted it
    _close_in_forks()
    _held.add(handle)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)
    except OSError as error:  # errors of a handle name no file
        _held.remove(handle)
        os.close(handle)
        raise OSError(error.errno, error.strerror, str(run_dir / LOCK)) from error
    return handle


def _open(run_dir: Path) -> int:
    handle = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not try_lock(handle, fcntl.LOCK_EX):
        os.close(handle)
        raise _in_use(run_dir, _holder(run_dir))
    return handle


def _is_current(handle: int, run_dir: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(run_dir / LOCK))
    except FileNotFoundError:
        return False


def _holder(run_dir: Path) -> str:
    try:
        known = json.loads((run_dir / LOCK).read_text())
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is being written
        return "which has just started"
