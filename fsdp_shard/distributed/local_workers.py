"""Ranks started on this machine through torch's elastic launcher, their signals, and what they have to say at the end.

A rank that fails leaves a report in a directory that this process made; the first cause among the reports is what the
user sees, once. Knows no config: what is run is a function and its argument.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from fsdp_shard import errors
from fsdp_shard.distributed.agent import Agent, give_signs_of_life
from fsdp_shard.distributed.process_group import attempt
from fsdp_shard.distributed.rendezvous import Meeting
from fsdp_shard.distributed.signals import STOP_SIGNALS, Stopped, interrupt_on_signals, stop_signals
from fsdp_shard.errors import FsdpShardError, InputError, Interrupted, RankError, RunError
from fsdp_shard.utils import set_environment

C = TypeVar("C")
Share = Callable[[str, str], str]

_ALL_STARTED = "all-started"

# What gloo and NCCL say on the other ranks when one is gone.
_LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "remote process exited", "connection refused")
_WAITED_IN_VAIN = ("timed out waiting", "wait timeout", "watchdog caught collective operation timeout")


def run_ranks(
    work: Callable[[C], None],
    config: C,
    *,
    ranks: int,
    nodes: tuple[int, int],
    rendezvous: str | None,
    max_restarts: int,
    grace_seconds: int,
    timeout_seconds: float,
    start_method: str,
    num_threads: int,
    log: bool,
    prepare: Callable[[Share], None] | None = None,
) -> None:
    """Call `work(config)` on `ranks` processes here, together with those of other machines: `nodes` of them in all.

    `nodes` is the fewest and the most machines; with rendezvous None it is this one. `prepare(share)` is called before
    any rank starts: `share(name, value)` is what the first machine gave under that name.

    Returns when all ranks have returned. After a failure all ranks of all machines are started again, up to
    `max_restarts` times, unless it would come again: what is wrong with the input, or a signal. A rank that gives no
    sign of life for `timeout_seconds` has failed. Signals that ask to stop are passed to the ranks, which have
    `grace_seconds` to save and end. Raises the first cause: an error of ours as the rank raised it, RankError for
    anything else, Interrupted after a signal.
    """
    _quieten_torch(log)
    variables = {
        "OMP_NUM_THREADS": str(num_threads),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in stop_signals()),
    }
    before = {number: signal.getsignal(number) for number in stop_signals()}
    alone = rendezvous is None
    with set_environment(variables), tempfile.TemporaryDirectory(prefix="fsdp-shard-") as reports:
        here = Path(reports)
        error: FsdpShardError | None = None
        meeting: Meeting | None = None
        agent: Agent | None = None
        try:
            meeting = Meeting(*nodes, rendezvous)
            if prepare is not None:
                prepare(meeting.first_value)
            agent = Agent(
                WorkerSpec(
                    role="rank",
                    local_world_size=ranks,
                    entrypoint=_rank_main,
                    args=(work, config, reports, num_threads),
                    rdzv_handler=meeting,
                    max_restarts=max_restarts,
                    monitor_interval=0.05,
                    local_addr=meeting.local_addr,
                ),
                # torch makes a directory for logs even when it writes none.
                DefaultLogsSpecs(log_dir=reports),
                start_method=start_method,
                grace_seconds=grace_seconds,
                timeout_seconds=timeout_seconds,
                sign_of_life=lambda attempt, rank: _sign_of_life(_attempt_directory(here, attempt), rank),
                all_started=lambda attempt: _let_go(_attempt_directory(here, attempt)),
                # A fixed number of machines that one of them was told to leave cannot go on.
                restarts=lambda status: not (status == InputError.exit_status or (status > 128 and len({*nodes}) == 1)),
            )
            result = agent.run()
            meeting.shutdown()
            if result is None or result.is_failed():
                # Which global ranks are here is known only when there is one machine.
                last = _last_attempt(here)
                unfinished = set(range(ranks if alone else 0)) - _finished(last)
                error = first_cause(read_reports(last), _how_it_died(agent, timeout_seconds), unfinished)
        except SignalException as stopped:
            _kill_ranks()
            error = _interrupted(read_reports(_last_attempt(here)), int(stopped.sigval))
        except RendezvousError as failed:
            _kill_ranks()
            error = RunError(f"The machines of the run could not meet at launch.rendezvous={rendezvous}: {failed}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if meeting is not None:
                meeting.leave()
        if error is not None:
            raise error


@dataclass(frozen=True)
class Report:
    """What a rank says when it fails: the error's class, message, exit status and traceback, and when it was."""

    rank: int
    kind: str
    message: str
    exit_status: int
    traceback: str
    time: float


def _rank_main(work: Callable[[Any], None], config: Any, reports: str, num_threads: int) -> None:
    """One rank, from its first line to its last."""
    # A process group of its own: Ctrl-C then reaches the starting process only, which passes it on exactly once.
    os.setpgid(0, 0)
    interrupt_on_signals(ctrl_c=True)
    torch.set_num_threads(num_threads)
    place = _attempt_directory(Path(reports), attempt())
    place.mkdir(exist_ok=True)
    give_signs_of_life(place / f"rank-{os.environ['RANK']}.alive")
    try:
        try:
            _wait_for(place / _ALL_STARTED)
            work(config)
        finally:
            _on_signals(signal.SIG_IGN)  # the report is written whole
        (place / f"rank-{os.environ['RANK']}.done").touch()
    except BaseException as error:
        report = _report(error)
        (place / f"rank-{report.rank}.json").write_text(json.dumps(asdict(report)), encoding="utf-8")
        raise SystemExit(report.exit_status) from None
    finally:
        _on_signals(signal.SIG_DFL)  # what follows is torch waiting for the other ranks


def _let_go(place: Path) -> None:
    """Tell the ranks of this attempt, which wait for it, that all of them are there."""
    place.mkdir(exist_ok=True)
    (place / _ALL_STARTED).touch()


def _wait_for(file: Path) -> None:
    """Until the launcher has made `file`; RankError if it dies before."""
    launcher = os.getppid()
    while not file.exists():
        time.sleep(0.005)
        if os.getppid() != launcher:
            raise RankError("The process that started the ranks has died.")


def _on_signals(handler: signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def _report(error: BaseException) -> Report:
    error = error.as_error() if isinstance(error, Stopped) else error
    status = error.exit_status if isinstance(error, FsdpShardError) else 1
    return Report(
        rank=int(os.environ["RANK"]),
        kind=type(error).__name__,
        message=str(error),
        exit_status=status,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
    )


def read_reports(directory: Path) -> list[Report]:
    """The reports of all ranks that left one, the first to fail first."""
    reports = [Report(**json.loads(file.read_text(encoding="utf-8"))) for file in directory.glob("rank-*.json")]
    return sorted(reports, key=lambda report: report.time)


def _attempt_directory(reports: Path, attempt: str) -> Path:
    """Where the ranks of an attempt leave word; the first to do so makes it."""
    return reports / f"attempt-{attempt}"


def _last_attempt(reports: Path) -> Path:
    """Where the ranks of the last attempt left word; those of earlier ones failed for reasons of their own."""
    attempts = sorted(reports.glob("attempt-*"), key=lambda place: int(place.name.removeprefix("attempt-")))
    return attempts[-1] if attempts else reports


def _finished(directory: Path) -> set[int]:
    """The ranks whose work was done; torch still stops them when another one fails."""
    return {int(file.stem.removeprefix("rank-")) for file in directory.glob("rank-*.done")}


def _sign_of_life(place: Path, rank: int) -> Path | None:
    """What a rank touches while it is at work; None when its work is done, and torch ends it."""
    return None if (place / f"rank-{rank}.done").exists() else place / f"rank-{rank}.alive"


def _how_it_died(agent: Agent, timeout_seconds: float) -> tuple[int, str]:
    """The rank that was found dead first, and in what way."""
    rank, status = agent.first_death or (0, 1)
    if rank in agent.frozen:
        return rank, (
            f"gave no sign of life for launch.timeout_seconds={timeout_seconds:g} and was killed; it was stopped, or "
            f"hung in a call to the system"
        )
    if status < 0:
        hint = "; the machine may have run out of memory" if -status == signal.SIGKILL else ""
        return rank, f"was killed by {signal.Signals(-status).name}{hint}"
    return rank, f"ended with exit status {status}"


def first_cause(reports: list[Report], died: tuple[int, str], unfinished: set[int]) -> FsdpShardError:
    """What to tell the user, out of what the ranks left behind.

    `died` is the rank that was found dead first, and how; `unfinished` are those of this machine that were still at
    work, where that is known. A rank that is killed leaves no report: then the others say that they lost it, or that
    they were told to stop.
    """
    told = [report for report in reports if report.kind != "Interrupted"]
    silent = (unfinished | {died[0]}) - {report.rank for report in reports}
    if told and not (silent and _lost_a_peer(told[0])):
        return _as_error(told[0])
    if silent:
        rank = died[0] if died[0] in silent else min(silent)
        if rank == died[0]:
            how = died[1]
        elif told and _says(told[0], _WAITED_IN_VAIN):
            how = "kept the others waiting for longer than launch.timeout_seconds"
        else:
            how = "died without a word; it may have been killed for its memory"
        return RankError(f"Rank {rank} {how}. The other ranks were stopped.")
    return _as_error(reports[0])


def _lost_a_peer(report: Report) -> bool:
    return _says(report, _LOST_PEER + _WAITED_IN_VAIN)


def _says(report: Report, phrases: tuple[str, ...]) -> bool:
    return any(phrase in report.message.lower() for phrase in phrases)


def _as_error(report: Report) -> FsdpShardError:
    known = getattr(errors, report.kind, None)
    if not (isinstance(known, type) and issubclass(known, FsdpShardError)):
        message = f"Rank {report.rank} raised {report.kind}: {report.message.rstrip('.')}."
        return RankError(message, traceback=report.traceback)
    if known is Interrupted:
        return Interrupted(report.message, signal_number=report.exit_status - 128)
    error: FsdpShardError = known(report.message)
    error.__cause__ = RankError(f"Rank {report.rank}", traceback=report.traceback)
    return error


def _interrupted(reports: list[Report], number: int) -> FsdpShardError:
    """After a signal: what the first rank says of it, or the error that it met while it stopped."""
    stopped = sorted((report for report in reports if report.kind == "Interrupted"), key=lambda report: report.rank)
    failed = [report for report in reports if report.kind != "Interrupted" and not _lost_a_peer(report)]
    if failed:
        return _as_error(failed[0])
    message = stopped[0].message if stopped else f"Stopped by {signal.Signals(number).name}."
    return Interrupted(message, signal_number=number)


def _kill_ranks() -> None:
    """End ranks that a second signal left running: leaving this process would wait for them."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


def _quieten_torch(log: bool) -> None:
    """Leave the telling to this module; torch's launcher logs each failure several times over."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")):
            logging.getLogger(name).disabled = not log
