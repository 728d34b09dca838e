"""A lock on a run directory, so that two runs never write into one. Knows nothing of what is in it.

Rank 0 holds an advisory lock (flock) on RUN_DIR/.lock for as long as it lives: the system gives it back when the
process ends, however it ends, so a lock is never stale. On a file, and not on the directory, since NFS has the machines
agree on locks of files that are open for writing. What the file says is for people. Where the file system has no locks,
runs are not kept out (`doctor` tells).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def run_lock(run_dir: str, context: DistributedContext) -> Iterator[None]:
    """Keep other runs out of `run_dir` while the block runs; ConfigError, on all ranks, if another one is in it."""
    handle = context.together(lambda: _take(Path(run_dir)) if context.is_main else None)
    try:
        yield
    finally:
        if handle is not None:
            (Path(run_dir) / LOCK).unlink(missing_ok=True)
            os.close(handle)


def holder(run_dir: Path) -> str | None:
    """Who is in `run_dir`, for people; None when nobody is. Changes nothing."""
    try:
        handle = os.open(run_dir / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(handle, fcntl.LOCK_SH) else _holder(run_dir)
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> bool:
    """Lock an open file at once, unless another process has; True also where the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def check_free(run_dir: str, *, may_join: bool) -> bool:
    """Whether a run that this command joins is in `run_dir`; ConfigError if another one is. Changes nothing.

    `run_lock` has the last word: this is for finding out before anything is written.
    """
    other = holder(Path(run_dir))
    if other is not None and not may_join:
        raise _in_use(Path(run_dir), other)
    return other is not None


def _in_use(run_dir: Path, other: str) -> ConfigError:
    return ConfigError(
        f"run_dir={run_dir} is in use by another run ({other}); wait for it, stop it, or give another run_dir."
    )


def _take(run_dir: Path) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    while not _is_there(handle := _open(run_dir), run_dir):
        os.close(handle)  # whoever had it has ended just now, and removed it
    os.ftruncate(handle, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)
    return handle


def _open(run_dir: Path) -> int:
    handle = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not _lock(handle, fcntl.LOCK_EX):
        os.close(handle)
        raise _in_use(run_dir, _holder(run_dir))
    return handle


def _is_there(handle: int, run_dir: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(run_dir / LOCK))
    except FileNotFoundError:
        return False


def _holder(run_dir: Path) -> str:
    try:
        known = json.loads((run_dir / LOCK).read_text())
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is only just writing it
        return "which has only just started"
