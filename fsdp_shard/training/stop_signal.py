"""Requests to stop a run: SIGINT (Ctrl-C), SIGTERM, SIGUSR1 (Slurm's warning before a time limit) or SIGHUP.

The first signal only sets a flag. The loop reduces it over the ranks at the end of the step, so all ranks stop after
the same step and can save a checkpoint. A second signal ends this rank at once.
"""

import signal
import threading
import time
from types import FrameType
from typing import Self

from fsdp_shard.distributed import Communicator, stop_signals
from fsdp_shard.errors import Interrupted


class StopSignal:
    """Context manager that catches stop signals; `number` is the first one received, or 0.

    This works only in the main thread; in other threads, signals are left to the calling program.

    A launcher forwards Ctrl-C to ranks that have already received it from the terminal, so a signal within
    `grace_seconds` of the first one counts as the same request.
    """

    def __init__(self, grace_seconds: float = 2.0) -> None:
        self.number = 0
        self._grace_seconds = grace_seconds
        self._since = 0.0

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._receive) for number in (stop_signals() if is_main else [])}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > self._grace_seconds:
            name = signal.Signals(number).name
            raise Interrupted(f"A second signal ({name}) ended the run at once, without a save.", signal_number=number)


def interrupted(number: int, step: int, run_dir: str, resume: str) -> Interrupted:
    """Return the error that ends an interrupted run, after its last step is saved.

    Args:
        number: The signal.
        step: The last step.
        run_dir: Directory of the run.
        resume: The `resume` setting of the run.
    """
    again = f"run_dir={run_dir}" if resume == "auto" else f"run_dir={run_dir} resume=auto"
    return Interrupted(
        f"Stopped by {signal.Signals(number).name} after step {step}, which is saved in {run_dir}. "
        f"To resume, give the same command with {again}.",
        signal_number=number,
    )


def any_stop_signal(stop: StopSignal, ranks: Communicator) -> int:
    """Return a signal that any rank received, the same on all ranks, or 0; a collective."""
    return int(ranks.all_reduce([stop.number], "max")[0])


def raise_if_stopped(stop: StopSignal, ranks: Communicator, during: str) -> None:
    """Raise Interrupted on all ranks if any rank received a signal before training; a collective.

    Args:
        stop: The signals of this rank.
        ranks: The ranks.
        during: The interrupted phase, whose work is lost.
    """
    if number := any_stop_signal(stop, ranks):
        raise stopped_before_training(number, during, "Give the same command to begin again.")


def stopped_before_training(number: int, during: str, advice: str) -> Interrupted:
    """Return the error that ends a run which a signal interrupted in a phase before training."""
    name = signal.Signals(number).name
    return Interrupted(f"Stopped by {name} before training, in {during}. {advice}", signal_number=number)
