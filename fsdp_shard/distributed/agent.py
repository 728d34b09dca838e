"""torch's elastic agent of one machine, extended to end ranks sooner that cannot continue, and to detect frozen ones.

When a rank dies, torch gives the others 30 s, which ranks that wait for the dead one would use up; this agent gives
them a few seconds. A rank that is stopped or hangs in the kernel never exits, so each rank has a heartbeat. A rank
whose heartbeat stops for too long is killed, before NCCL ends the ranks that wait for it.
"""

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.distributed.elastic_private import OverridableAgent
from fsdp_shard.distributed.key_value_store import ATTEMPT, ATTEMPT_KEY, wait_for_members
from fsdp_shard.distributed.rank_reports import AttemptDirectory
from fsdp_shard.distributed.signals import holding_signals
from fsdp_shard.errors import InputError
from fsdp_shard.utils import set_environment

_SECONDS_TO_END = 5.0  # for ranks that have lost another one to notice and report it
_SECONDS_TO_SAVE = 30.0
_SECONDS_TO_START = 10.0
_POLL_SECONDS = 0.05
_SILENT_FRACTION = 0.75  # of launch.timeout_seconds, after which NCCL would end the ranks that wait for the frozen one


class Heartbeats:
    """Measures how long each rank's heartbeat has stopped, counting only time during which this process itself ran."""

    def __init__(self) -> None:
        self._last: dict[Path, int] = {}
        self._silent: dict[Path, float] = {}
        self._checked = time.monotonic()

    def silent_seconds(self, files: Iterable[Path]) -> dict[Path, float]:
        """Return the seconds since each heartbeat; a rank that has just started has no file yet."""
        now = time.monotonic()
        passed, self._checked = min(now - self._checked, 1.0), now
        found = {}
        for file in files:
            try:
                changed = file.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            found[file] = 0.0 if changed != self._last.get(file) else self._silent[file] + passed
            self._last[file] = changed
        self._silent |= found
        return found


class Agent(OverridableAgent):
    """Starts the ranks of this machine and monitors them.

    Args:
        spec: The program to run, and the rendezvous of the machines.
        settings: Restarts, timeouts and grace period of the run.
        start_method: fork or spawn.
        reports: Directory in which each attempt has an `AttemptDirectory`.
    """

    def __init__(self, spec: WorkerSpec, settings: LaunchConfig, start_method: str, reports: Path) -> None:
        # torch creates a log directory even if it writes no logs.
        logs = DefaultLogsSpecs(log_dir=str(reports))
        super().__init__(spec, logs, start_method, settings.grace_seconds)
        self._settings, self._reports = settings, reports
        self._heartbeats = Heartbeats()
        self._attempt = AttemptDirectory(reports)
        # State of the last attempt: the rank that died first, its exit status as in Python, the frozen ranks, and
        # process ids by rank.
        self._first_death: tuple[int, int] | None = None
        self._death_noticed_at: float | None = None
        self._frozen: set[int] = set()
        self._early_errors: dict[int, str] = {}  # from ranks that raised an error before they began their work
        self._pids: dict[int, int] = {}
        self._started, self._waited_for = time.monotonic(), list[int]()

    def first_death(self) -> tuple[int, str]:
        """Return the rank that was found dead first, and how it died."""
        rank, status = self._first_death or (0, 1)
        if rank in self._frozen:
            return rank, (
                f"sent no heartbeat for {self._silent_seconds:g} s (of launch.timeout_seconds="
                f"{self._settings.timeout_seconds:g}) and was killed; it was stopped, or hung in a system call"
            )
        if self._waited_for:
            return rank, (
                f"was killed by SIGABRT, as NCCL ends a rank that has waited for launch.timeout_seconds="
                f"{self._settings.timeout_seconds:g}; rank(s) {', '.join(map(str, self._waited_for))} did not "
                f"join the collective, or waited too"
            )
        if status < 0:
            hint = "; the machine may have run out of memory" if -status == signal.SIGKILL else ""
            return rank, f"was killed by {signal.Signals(-status).name}{hint}"
        if rank in self._early_errors:
            return rank, f"ended with exit status {status}, before its work began: {self._early_errors[rank]}"
        has_begun = self._attempt.heartbeat(rank).exists()
        return (
            rank,
            f"ended with exit status {status}{'' if has_begun else ', before its work began; see its error above'}",
        )

    @property
    def _silent_seconds(self) -> float:
        return _SILENT_FRACTION * self._settings.timeout_seconds

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._first_death, self._frozen, self._death_noticed_at, self._early_errors = None, set(), None, {}
        self._started, self._waited_for = time.monotonic(), []
        group: Any = worker_group  # torch annotates the fields only as they are before the rendezvous
        attempt = bytes(group.store.get(ATTEMPT_KEY)).decode()
        self._attempt = AttemptDirectory.create(self._reports, attempt)
        with set_environment({ATTEMPT: attempt}), holding_signals():  # the ranks inherit both
            pids = super().start_workers(worker_group)
        self._pids = {int(worker.global_rank): pids[worker.local_rank] for worker in worker_group.workers}
        # A thread of one of the launchers serves the store, and resolves the name of each client: a rank forked at that
        # moment finds the C library's resolver locked forever. So no rank connects before all are forked. The others do
        # not wait for one late machine, as the problem is then rare.
        wait_for_members(group.store, "fsdp-shard/started", group.group_world_size, _SECONDS_TO_START)
        self._attempt.release()
        return pids

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {int(worker.global_rank): int(worker.id) for worker in worker_group.workers}
        self._kill_frozen(pids)
        died = {rank: status for rank, pid in pids.items() if (status := _exit_status(pid)) not in (None, 0)}
        if died and self._death_noticed_at is None:
            self._note_first_death(died, pids)
            _send(signal.SIGTERM, [pid for rank, pid in pids.items() if rank not in died])
        if self._death_noticed_at is not None:
            # torch's own way of detecting a dead rank blocks until all have ended.
            running = [pid for pid in pids.values() if _exit_status(pid) is None]
            if running and time.monotonic() - self._death_noticed_at < _SECONDS_TO_END:
                return RunResult(state=WorkerState.HEALTHY)
            _send(signal.SIGKILL, running)
        result = super().monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            self._note_message(rank, failure.message)
        if self._death_noticed_at is None and result.failures:  # a rank has died since we looked
            self._note_first_death({rank: failure.exitcode for rank, failure in result.failures.items()}, pids)
        return result

    def _note_first_death(self, died: Mapping[int, int | None], pids: Mapping[int, int]) -> None:
        """Record the rank that died first, and forbid restarts if the same cause would end it again."""
        self._death_noticed_at = time.monotonic()
        statuses = {rank: 1 if status is None else status for rank, status in died.items()}
        self._first_death = min(statuses.items(), key=lambda death: death[1] >= 0)  # killed ranks come first
        is_late = self._death_noticed_at - self._started > self._settings.timeout_seconds
        if self._first_death[1] == -signal.SIGABRT and is_late:
            self._waited_for = sorted(pids.keys() - died)
        # Wrong input would fail again. A fixed number of machines cannot continue after one was asked to stop.
        status = self._first_death[1]
        if status == InputError.exit_status or (status > 128 and not self._settings.is_elastic):
            self.forbid_restarts()

    def _note_message(self, rank: int, message: Any) -> None:
        """Record an error that torch wrote down, from its own code around our work, which reports its own errors."""
        if isinstance(message, dict):  # else torch knows of none
            self._early_errors[rank] = str(message["message"]).rstrip(".")
            self._first_death = rank, 1

    def end_ranks(self, number: signal.Signals, timeout_seconds: int) -> None:
        # A finished rank waits for this launcher to read its result, which no longer happens. The first signal may have
        # arrived while the rank still worked, and its effect ended with that work.
        _send(number, self._running_pids())
        deadline = time.monotonic() + timeout_seconds
        while self._running_pids() and time.monotonic() < deadline:
            _send(signal.SIGTERM, self._running_pids(self._attempt.finished()))
            time.sleep(_POLL_SECONDS)

    def _running_pids(self, among: Collection[int] | None = None) -> list[int]:
        """Return the running processes of the last attempt, of all ranks or of those in `among`."""
        pids = (pid for rank, pid in self._pids.items() if among is None or rank in among)
        return [pid for pid in pids if _exit_status(pid) is None]

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        # Healthy ranks are stopped because a machine joined or left, and may save first. But if that machine died
        # during a collective, they would hang.
        is_healthy = self._death_noticed_at is None
        seconds = min(self._settings.grace_seconds, _SECONDS_TO_SAVE) if is_healthy else _SECONDS_TO_END
        self.shut_down(int(seconds))
        # Processes that a rank started end with it: they could hold files and locks that the next attempt needs.
        _send(signal.SIGKILL, [-int(worker.id) for worker in worker_group.workers])

    def _kill_frozen(self, pids: dict[int, int]) -> None:
        files = {self._attempt.heartbeat(rank): rank for rank in pids.keys() - self._attempt.finished()}
        for file, seconds in self._heartbeats.silent_seconds(files).items():
            rank = files[file]
            if seconds > self._silent_seconds and rank not in self._frozen:
                self._frozen.add(rank)
                _send(signal.SIGKILL, [pids[rank]])


def _exit_status(pid: int) -> int | None:
    """Return the exit status of a child, negative for a signal; None while it runs. torch can still reap the child."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch has reaped it already
        return 0
    if found is None:
        return None
    return int(found.si_status) if found.si_code == os.CLD_EXITED else -int(found.si_status)


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes, and to process groups for negative numbers."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
