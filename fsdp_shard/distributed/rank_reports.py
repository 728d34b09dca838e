"""Reports from the ranks of a machine to their launcher through files, and the search for the cause of a failure.

A rank touches a heartbeat file while it works, marks that it has finished, and reports the error that ended it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_shard import errors
from fsdp_shard.distributed.signals import Stopped
from fsdp_shard.utils import hold_lock, is_abandoned

_HEARTBEAT_SECONDS = 1.0
_PREFIX, _LOCK = "fsdp-shard-", "launcher.lock"  # of a launcher's directory

# Error texts of gloo and NCCL on the other ranks after one is lost.
_LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "remote process exited", "connection refused")
_PEER_TIMEOUT = ("timed out waiting", "wait timeout", "watchdog caught collective operation timeout")


@dataclass(frozen=True)
class RankFailure:
    """The error that ended a rank: its class, message, exit status, traceback, and the time of day in seconds."""

    rank: int
    kind: str
    message: str
    exit_status: int
    traceback: str
    time: float

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Create the report of `error`, which ended this rank."""
        stopped = _stop_behind(error)
        error = error if stopped is None else stopped.as_error()
        return cls(
            rank=int(os.environ["RANK"]),
            kind=type(error).__name__,
            message=str(error),
            exit_status=error.exit_status if isinstance(error, errors.FsdpShardError) else 1,
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
        )

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank failed because another rank was lost or late."""
        return self.mentions(_LOST_PEER + _PEER_TIMEOUT)

    def mentions(self, phrases: tuple[str, ...]) -> bool:
        """Whether the message contains one of the lower-case `phrases`."""
        return any(phrase in self.message.lower() for phrase in phrases)

    def as_error(self) -> errors.FsdpShardError:
        """Return the rank's error if its class is from this package, else a RankError."""
        known = getattr(errors, self.kind, None)
        if not (isinstance(known, type) and issubclass(known, errors.FsdpShardError)):
            message = f"Rank {self.rank} raised {self.kind}: {self.message.rstrip('.')}."
            return errors.RankError(message, traceback=self.traceback)
        if known is errors.Interrupted:
            return errors.Interrupted(self.message, signal_number=self.exit_status - 128)
        error: errors.FsdpShardError = known(self.message)
        error.__cause__ = errors.RankError(f"Rank {self.rank}", traceback=self.traceback)
        return error


def _stop_behind(error: BaseException | None) -> Stopped | None:
    """Return the stop that `error` is or was raised from: Python up to 3.11 wraps exceptions in `__set_name__`."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__
    return error


@dataclass(frozen=True)
class AttemptDirectory:
    """The files through which the ranks of one attempt and their launcher communicate."""

    path: Path

    @classmethod
    def create(cls, reports: Path, attempt: str) -> AttemptDirectory:
        """Create the directory of an attempt below `reports` if it does not exist."""
        path = reports / f"attempt-{attempt}"
        path.mkdir(exist_ok=True)
        return cls(path)

    @classmethod
    def last(cls, reports: Path) -> AttemptDirectory:
        """Return the directory of the last attempt; earlier attempts failed for separate reasons."""
        attempts = sorted(reports.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
        return cls(attempts[-1] if attempts else reports)

    def heartbeat(self, rank: int) -> Path:
        """Return the file that a rank touches while it works."""
        return self.path / f"rank-{rank}.alive"

    def start_heartbeat(self, rank: int) -> None:
        """Touch the heartbeat of this rank every second from a thread, as long as the process runs.

        If the launcher dies, as by SIGKILL, the rank is asked to stop, and ends after its work: torch would then wait
        for the launcher forever. (torch has the kernel send SIGINT, which jobs in the background ignore.) With ranks
        on other machines it ends at once, so that those can go on without it.
        """
        file = self.heartbeat(rank)
        file.touch()

        def touch() -> None:
            while _has_launcher():
                time.sleep(_HEARTBEAT_SECONDS)
                try:
                    os.utime(file)
                except OSError:  # the launcher and its directory are gone
                    return
            is_only_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
            os.kill(os.getpid(), signal.SIGTERM if is_only_machine else signal.SIGKILL)
            while True:
                time.sleep(_HEARTBEAT_SECONDS)
                if rank in self.finished():
                    os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=touch, name="heartbeat", daemon=True).start()

    def release(self) -> None:
        """Let the ranks begin, which wait until all of them have started."""
        (self.path / "all-started").touch()

    def wait_for_release(self) -> None:
        """Wait for `release`; raise RankError if the launcher dies before it."""
        while not (self.path / "all-started").exists():
            time.sleep(0.005)
            if not _has_launcher():
                raise errors.RankError("The process that started the ranks has died.")

    def mark_finished(self, rank: int) -> None:
        """Record that a rank has finished its work."""
        (self.path / f"rank-{rank}.done").touch()

    def finished(self) -> set[int]:
        """Return the ranks that have finished their work; torch still stops them if another rank fails."""
        return {int(file.stem.removeprefix("rank-")) for file in self.path.glob("rank-*.done")}

    def write(self, report: RankFailure) -> None:
        """Save the report of a rank; on a full disk, print it."""
        new = self.path / f"rank-{report.rank}.new"  # the launcher may kill this rank at any moment
        try:
            new.write_text(json.dumps(asdict(report)), encoding="utf-8")
            new.rename(self.path / f"rank-{report.rank}.json")
        except OSError as error:
            print(f"Rank {report.rank}: {report.kind}: {report.message} (not reported: {error})", file=sys.stderr)

    def reports(self) -> list[RankFailure]:
        """Return the reports of all ranks that left one, the first to fail first."""
        reports = [
            RankFailure(**json.loads(file.read_text(encoding="utf-8"))) for file in self.path.glob("rank-*.json")
        ]
        return sorted(reports, key=lambda report: report.time)


def _has_launcher() -> bool:
    """Whether the process that started this rank is alive."""
    launcher = multiprocessing.parent_process()
    return launcher is None or launcher.pid == os.getppid()


@contextmanager
def reports_directory() -> Iterator[Path]:
    """Create a temporary directory for a launcher's attempts, and delete those of launchers that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not directory.is_symlink() and is_abandoned(directory / _LOCK):
            shutil.rmtree(directory, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made:
        lock = hold_lock(Path(made) / _LOCK)  # forked ranks also hold it
        try:
            yield Path(made)
        finally:
            os.close(lock)


def first_cause(reports: list[RankFailure], died: tuple[int, str], unfinished: set[int]) -> errors.FsdpShardError:
    """Find the failure that caused the others.

    A killed rank leaves no report; the others then report that they lost it, or that they were stopped.

    Args:
        reports: The reports of the last attempt, the first to fail first.
        died: The rank found dead first, and how it died.
        unfinished: The ranks of this machine that were still working, if known.

    Returns:
        The error to raise in the launcher.
    """
    failed = [report for report in reports if report.kind != "Interrupted"]
    silent = (unfinished | {died[0]}) - {report.rank for report in reports}
    if failed and not (silent and failed[0].is_lost_peer):
        return failed[0].as_error()
    if not silent:
        return reports[0].as_error()
    rank = died[0] if died[0] in silent else min(silent)
    if rank == died[0]:
        how = died[1]
    elif failed and failed[0].mentions(_PEER_TIMEOUT):
        how = "kept the other ranks waiting for longer than launch.timeout_seconds"
    else:
        how = "exited without an error; it may have been killed by the out-of-memory killer"
    return errors.RankError(f"Rank {rank} {how}. The other ranks were stopped.")


def interruption(reports: list[RankFailure], number: int) -> errors.FsdpShardError:
    """Find the error to raise after a signal: one met while stopping, or the first rank's report of the stop.

    Args:
        reports: The reports of the last attempt.
        number: The signal.

    Returns:
        The error to raise in the launcher.
    """
    failed = [report for report in reports if report.kind != "Interrupted" and not report.is_lost_peer]
    if failed:
        return failed[0].as_error()
    stopped = [report for report in reports if report.kind == "Interrupted"]
    first = min(stopped, key=lambda report: report.rank, default=None)
    message = first.message if first else f"Stopped by {signal.Signals(number).name}."
    return errors.Interrupted(message, signal_number=number)
