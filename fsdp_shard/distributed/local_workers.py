"""Starts ranks on this machine through torch's elastic launcher, passes signals on, and reports the first error."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.numa.binding import AffinityMode, NumaOptions

from fsdp_shard.distributed.agent import Agent
from fsdp_shard.distributed.config import Launchable, LaunchConfig
from fsdp_shard.distributed.hardware import can_bind_to_numa_nodes, wants_numa_binding
from fsdp_shard.distributed.key_value_store import attempt
from fsdp_shard.distributed.rank_reports import (
    AttemptDirectory,
    RankFailure,
    first_cause,
    interruption,
    reports_directory,
)
from fsdp_shard.distributed.rendezvous import Rendezvous
from fsdp_shard.distributed.signals import STOP_SIGNALS, interrupt_on_signals, release_signals, stop_signals
from fsdp_shard.errors import FsdpShardError, RunError
from fsdp_shard.utils import make_output_printable, set_environment, until_unread

C = TypeVar("C", bound=Launchable)

_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing", "torch.numa")


def run_ranks(work: Callable[[C], None], config: C, *, start_method: str, num_threads: int) -> None:
    """Call `work(config)` on the ranks of this machine, together with those of other machines.

    All machines first agree on `config.run_dir`. After a failure all ranks of all machines are restarted, up to
    `launch.max_restarts` times, unless it would recur: wrong input, or a signal. Stop signals are passed to the ranks,
    which have `launch.grace_seconds` to save and exit.

    Args:
        work: What each rank does; must be picklable if they are spawned.
        config: Argument of `work`. With `debug`, torch's elastic launcher may log.
        start_method: fork or spawn.
        num_threads: Threads of each rank, for torch and OpenMP.

    Raises:
        FsdpShardError: The first failure: an error of this package as the rank raised it, RankError for any other,
            Interrupted after a signal.
    """
    settings = config.launch
    with (
        _torch_launcher(config.debug, num_threads),
        reports_directory() as reports,
        ExitStack() as cleanup,
    ):
        try:
            rendezvous = Rendezvous.create(settings)
            cleanup.callback(rendezvous.leave)
            _keep_handlers(cleanup)
            # Named after the time, it would differ on each machine, and after a restart.
            config.run_dir = rendezvous.first_value("run_dir", config.run_dir)
            spec = WorkerSpec(
                role="rank",
                local_world_size=settings.ranks,
                entrypoint=_rank_main,
                args=(work, config, reports, num_threads),
                rdzv_handler=rendezvous,
                max_restarts=settings.max_restarts,
                monitor_interval=0.05,
                local_addr=rendezvous.local_addr,
                numa_options=numa_options(settings),
            )
            error = _run_agent(Agent(spec, settings, start_method, reports), rendezvous, settings, reports)
        except SignalException as stopped:
            _kill_ranks()
            error = _interruption(AttemptDirectory.last(reports), settings.ranks, int(stopped.sigval))
        except RendezvousError as failed:
            _kill_ranks()
            error = RunError(
                f"The rendezvous of the machines failed at launch.rendezvous={settings.rendezvous}: {failed}"
            )
    if error is not None:
        raise error


def _interruption(last: AttemptDirectory, num_ranks: int, number: int) -> FsdpShardError | None:
    """Return the error of a signal; None if the ranks finished all of their work after it."""
    return None if len(last.finished()) == num_ranks else interruption(last.reports(), number)


def _keep_handlers(cleanup: ExitStack) -> None:
    """Restore the signal handlers, which torch's agent replaces, on exit; only the main thread has any."""
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            cleanup.callback(signal.signal, number, signal.getsignal(number))


def numa_options(settings: LaunchConfig) -> NumaOptions | None:
    """Return how torch binds ranks to processors; `auto` binds none if the machine does not report which are near."""
    is_auto = settings.numa_binding == "auto"
    if not wants_numa_binding(settings) or (is_auto and not can_bind_to_numa_nodes()):
        return None
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=is_auto)


def _run_agent(agent: Agent, rendezvous: Rendezvous, settings: LaunchConfig, reports: Path) -> FsdpShardError | None:
    """Run until all ranks have ended; return the first failure of the last attempt, if it failed."""
    result = agent.run()
    rendezvous.shutdown()
    if result is not None and not result.is_failed():
        return None
    last = AttemptDirectory.last(reports)
    # The global ranks of this machine are known only if it is the only one.
    local_ranks = range(settings.ranks if settings.max_nodes == 1 else 0)
    return first_cause(last.reports(), agent.first_death(), set(local_ranks) - last.finished())


def _rank_main(work: Callable[[Any], None], config: Any, reports: Path, num_threads: int) -> None:
    """Run one rank, from its first line to its last."""
    directory, rank = AttemptDirectory.create(reports, attempt()), int(os.environ["RANK"])
    try:
        try:
            # Its own process group: Ctrl-C then only signals the starting process, which passes it on once.
            os.setpgid(0, 0)
            interrupt_on_signals(ctrl_c=True)
            release_signals()
            make_output_printable()
            torch.set_num_threads(num_threads)
            directory.start_heartbeat(rank)
            directory.wait_for_release()
            work(config)
        finally:
            _on_signals(signal.SIG_IGN)  # no signal may interrupt writing the report
        directory.mark_finished(rank)
    except BaseException as error:
        report = RankFailure.of(error)
        directory.write(report)
        # Immediately: Python's shutdown would destroy the process group, which may wait for ranks waiting for this one.
        for stream in (sys.stdout, sys.stderr):
            with until_unread(stream):
                stream.flush()
        os._exit(report.exit_status)
    _on_signals(signal.SIG_DFL)  # torch now waits for the other ranks


def _on_signals(handler: signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


@contextmanager
def _torch_launcher(log: bool, num_threads: int) -> Iterator[None]:
    """Set the environment of torch's launcher and of ranks, and disable its loggers unless `log`.

    They log each failure several times.
    """
    variables = {
        "OMP_NUM_THREADS": str(num_threads),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in stop_signals()),
    }
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_TORCH_LOGGERS)]
    before = {logger: logger.disabled for logger in map(logging.getLogger, names)}
    for logger in before:
        logger.disabled = not log
    try:
        with set_environment(variables):
            yield
    finally:
        for logger, was_disabled in before.items():
            logger.disabled = was_disabled


def _kill_ranks() -> None:
    """Kill ranks that a second signal left running: this process would wait for them when it exits."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
