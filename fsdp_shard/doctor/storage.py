"""The place that a run writes to: who is in it, what it goes on from, and whether the disk does what commits rely on.

What is written to try it is removed again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

from fsdp_shard.checkpoint import RemoteStore, fsync_directory
from fsdp_shard.doctor.findings import Finding, ok, problem, warning
from fsdp_shard.training import TrainConfig, check_optimizer, find_step, holder, is_finished, read_trainer
from fsdp_shard.utils import format_size

_TRIAL_BYTES = 32 << 20
_SLOW_BYTES_A_SECOND = 50e6


def there(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there: what is made of it will lie on the same file system."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def run_directory(run_dir: str, resume: str, train: TrainConfig) -> Iterator[Finding]:
    """Whether the run may begin there, and where it begins. Nothing is fetched from a remote store."""
    if (other := holder(Path(run_dir))) is not None:
        yield problem(f"run_dir={run_dir} is in use by another run ({other}); wait for it, or give another run_dir.")
    step = find_step(resume, run_dir)
    if step is None:
        yield ok(f"run_dir={run_dir}: the run begins anew")
    elif is_finished(step, run_dir, train):
        yield warning(f"run_dir={run_dir}: the run is finished, so finetune would do nothing; give another run_dir.")
    else:
        check_optimizer(step)
        yield ok(f"run_dir={run_dir}: the run goes on from {step}, at step {read_trainer(step).step} of {train.steps}")


def disk(run_dir: str) -> Iterator[Finding]:
    """Whether files there can be written, synced, renamed and locked, and how fast they get onto the disk."""
    place = there(Path(run_dir))
    with TemporaryDirectory(prefix=".fsdp-shard-doctor-", dir=place) as scratch:
        seconds = _write(Path(scratch) / "trial.partial")
        os.rename(Path(scratch) / "trial.partial", Path(scratch) / "trial")
        fsync_directory(Path(scratch))
        handle = os.open(Path(scratch) / "trial", os.O_RDWR)  # as the lock of a run is
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield warning(f"{place} has no locks ({error.strerror}): nothing keeps two runs out of one run_dir there.")
        finally:
            os.close(handle)
    rate = _TRIAL_BYTES / seconds
    text = f"{place}: {format_size(disk_usage(place).free)} free, written and synced at {format_size(rate)}/s"
    yield ok(text) if rate > _SLOW_BYTES_A_SECOND else warning(f"{text}: each checkpoint will take its time")


def _write(path: Path) -> float:
    """Seconds to have a file of `_TRIAL_BYTES` on the disk."""
    content = os.urandom(_TRIAL_BYTES)  # some file systems compress
    begin = time.perf_counter()
    with open(path, "xb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def remote(url: str | None) -> Iterator[Finding]:
    """Whether the store of checkpoint.remote answers, if there is one."""
    if url is None:
        return
    latest = RemoteStore(url).latest()
    yield ok(f"{url} answers, and holds {'no checkpoint' if latest is None else f'checkpoints up to step {latest}'}")
