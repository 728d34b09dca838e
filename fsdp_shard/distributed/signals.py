"""The signals that ask a run to stop, and their handlers until a training loop installs its own, which save a step.

Handlers can only be installed in the main thread.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fsdp_shard.errors import Interrupted


class Stopped(BaseException):
    """A stop signal arrived without another handler. A BaseException, as libraries wrap or swallow Exceptions."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def as_error(self) -> Interrupted:
        """Return the error to show to the user."""
        return Interrupted(f"Stopped by {signal.Signals(self.number).name}.", signal_number=self.number)


_SECONDS_TO_SEND_AGAIN = 0.05  # a finalizer takes less

# Slurm sends SIGUSR1 before a time limit if requested.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop, without those that are ignored, such as SIGHUP under `nohup`."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def interrupt_on_signals(*, ctrl_c: bool) -> None:
    """Raise Stopped on stop signals; on Ctrl-C only if `ctrl_c`, else it stays Python's KeyboardInterrupt.

    A signal whose exception Python swallows, as it does in finalizers and around a fork, is sent again.
    """
    for number in stop_signals():
        if ctrl_c or number != signal.SIGINT:
            signal.signal(number, _hang_up if number == signal.SIGHUP else _stop)
    sys.unraisablehook = _send_again


def _send_again(swallowed: "sys.UnraisableHookArgs") -> None:
    match swallowed.exc_value:
        case Stopped() as stopped:
            number: int | None = stopped.number
        case KeyboardInterrupt():
            number = signal.SIGINT
        case error:
            number = getattr(error, "sigval", None)  # of SignalException, which torch's launcher raises
    if number is None:
        sys.__unraisablehook__(swallowed)
        return
    later = threading.Timer(_SECONDS_TO_SEND_AGAIN, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


@contextmanager
def holding_signals() -> Iterator[None]:
    """Deliver stop signals to processes that start in the block only once they call `release_signals`.

    After a fork, libraries run callbacks in the new process in which the exception of a handler is swallowed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """Deliver stop signals again, in a process that started within `holding_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def noting_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C instead of raising KeyboardInterrupt; a second one raises it.

    An exception raised at an arbitrary point leaves work half done, and is lost in a finalizer.

    Yields:
        A function that returns whether Ctrl-C has been pressed.
    """
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _hang_up(number: int, frame: FrameType | None) -> None:
    """Treat a closed terminal like SIGTERM, for which recipes have a handler that saves."""
    signal.raise_signal(signal.SIGTERM)
