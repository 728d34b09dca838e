"""torch's elastic agent of one machine, quicker to end ranks that cannot go on, and with an eye for frozen ones.

When a rank dies, torch gives the others 30 s, most of which ranks that wait for the dead one would sit out; here it is
a few seconds. A rank that is stopped or hangs in the kernel never dies: so each rank has a thread that gives a sign of
life, and one that gives none for too long is killed. Knows ranks as processes only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from fsdp_shard.distributed.process_group import ATTEMPT, ATTEMPT_KEY, wait_for_members
from fsdp_shard.utils import set_environment

_SECONDS_TO_END = 5.0  # for ranks that have lost another one: to notice it, and to leave word
_SECONDS_TO_SAVE = 30.0
_SECONDS_TO_START = 10.0
_SECONDS_BETWEEN_SIGNS = 1.0


def give_signs_of_life(file: Path) -> None:
    """Touch `file` every second from a thread, as long as this process runs."""
    file.touch()

    def touch() -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_SIGNS)
            try:
                os.utime(file)
            except OSError:  # the launcher is gone, and its directory with it
                return

    threading.Thread(target=touch, name="signs-of-life", daemon=True).start()


class SignsOfLife:
    """How long each rank has given no sign of life, counting only time in which this process itself has run."""

    def __init__(self) -> None:
        self._last: dict[Path, int] = {}
        self._silent: dict[Path, float] = {}
        self._looked = time.monotonic()

    def silent_seconds(self, files: list[Path]) -> dict[Path, float]:
        """For the files that are there: a rank that has only just started has none."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        for file in files:
            try:
                changed = file.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            self._silent[file] = 0.0 if changed != self._last.get(file) else self._silent[file] + passed
            self._last[file] = changed
        return {file: self._silent[file] for file in files if file in self._silent}


class Agent(LocalElasticAgent):
    """Starts the ranks of this machine and looks after them.

    `sign_of_life(attempt, rank)` is the file that a rank touches, while it is at work. `restarts(status)` says whether
    ranks are to be started again after one has ended with that exit status. `all_started(attempt)` is called when the
    ranks of all machines are there: none of them may meet the others before.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        *,
        start_method: str,
        grace_seconds: int,
        timeout_seconds: float,
        sign_of_life: Callable[[str, int], Path | None],
        restarts: Callable[[int], bool],
        all_started: Callable[[str], None],
    ) -> None:
        super().__init__(spec, logs, start_method=start_method, shutdown_timeout=grace_seconds)
        self._grace_seconds, self._timeout_seconds = grace_seconds, timeout_seconds
        self._sign_of_life, self._restarts, self._all_started = sign_of_life, restarts, all_started
        self._signs = SignsOfLife()
        self._attempt = ""
        self._first_seen_dead: float | None = None
        # Of the last attempt: the rank that died first, its exit status as Python gives it, and the frozen ones.
        self.first_death: tuple[int, int] | None = None
        self.frozen: set[int] = set()

    # torch's names: these are the methods that an agent of one's own overrides.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self.first_death, self.frozen, self._first_seen_dead = None, set(), None
        group: Any = worker_group  # torch's annotations know only what its fields are before the machines have met
        self._attempt = bytes(group.store.get(ATTEMPT_KEY)).decode()
        with set_environment({ATTEMPT: self._attempt}):  # the ranks inherit it
            pids: dict[int, int] = super()._start_workers(worker_group)
        # A thread of one of the launchers serves the store, and looks up the name of whoever comes to it: a rank that
        # is forked at that moment finds the resolver of the C library locked for ever. So nobody comes before all are
        # forked. One machine that is late does not keep the others: what could happen then is rare.
        wait_for_members(group.store, "fsdp-shard/started", group.group_world_size, _SECONDS_TO_START)
        self._all_started(self._attempt)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = {int(worker.global_rank): int(worker.id) for worker in worker_group.workers}
        self._kill_frozen(ranks)
        died = {rank: status for rank, pid in ranks.items() if (status := _exit_status(pid)) not in (None, 0)}
        if died and self._first_seen_dead is None:
            self._first_seen_dead = time.monotonic()
            self.first_death = min(died.items(), key=lambda one: one[1] >= 0)  # killed ones come first
            if not self._restarts(self.first_death[1]):
                self._remaining_restarts = 0
            _send(signal.SIGTERM, [pid for rank, pid in ranks.items() if rank not in died])
        if self._first_seen_dead is not None:
            # torch's own way of seeing that a rank has died blocks until all have ended.
            running = [pid for pid in ranks.values() if _exit_status(pid) is None]
            if running and time.monotonic() - self._first_seen_dead < _SECONDS_TO_END:
                return RunResult(state=WorkerState.HEALTHY)
            _send(signal.SIGKILL, running)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Ranks that are well are stopped because a machine came or went: they may save first. That machine's may have
        # died in the middle of a collective, though, and then these wait for nothing.
        seconds = min(self._grace_seconds, _SECONDS_TO_SAVE) if self._first_seen_dead is None else _SECONDS_TO_END
        self._shutdown(timeout=int(seconds))
        for worker in worker_group.workers:
            _kill_group(int(worker.id))

    def _kill_frozen(self, ranks: dict[int, int]) -> None:
        files = {file: rank for rank in ranks if (file := self._sign_of_life(self._attempt, rank)) is not None}
        for file, seconds in self._signs.silent_seconds(list(files)).items():
            rank = files[file]
            if seconds > self._timeout_seconds and rank not in self.frozen:
                self.frozen.add(rank)
                _send(signal.SIGKILL, [ranks[rank]])


def _exit_status(pid: int) -> int | None:
    """The exit status of a child, negative for a signal; None while it runs. torch still finds it to be reaped."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch has it already
        return 0
    if found is None:
        return None
    return int(found.si_status) if found.si_code == os.CLD_EXITED else -int(found.si_status)


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _kill_group(pid: int) -> None:
    """What a rank has started goes with it: it could hold files and locks that the next attempt needs."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
