"""A lock on a run directory, so that two runs never write into one. Knows nothing of what is in it.

Rank 0 holds an advisory lock (flock) on the directory itself for as long as it lives: the system gives it back when the
process ends, however it ends, so a lock is never stale. What RUN_DIR/.lock says is for people only.
"""

from __future__ import annotations

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
        handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _holder(run_dir)
    finally:
        os.close(handle)
    return None


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
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise _in_use(run_dir, _holder(run_dir)) from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    (run_dir / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
    return handle


def _holder(run_dir: Path) -> str:
    try:
        known = json.loads((run_dir / LOCK).read_text())
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is only just writing it
        return "which has only just started"
