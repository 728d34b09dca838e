"""The signals that ask a run to stop, and what they do in a process that has no handler of its own for them.

Installing one is for the main thread. Knows no recipe: a training loop puts its own handlers, which save, over these.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fsdp_shard.errors import Interrupted


class Stopped(BaseException):
    """A signal came while nothing handled it. No Exception: libraries wrap those, or go on after them."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def as_error(self) -> Interrupted:
        """What is told of it."""
        return Interrupted(f"Stopped by {signal.Signals(self.number).name}.", signal_number=self.number)


# SIGUSR1 is what Slurm sends before a time limit, when it is asked to.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop; not SIGHUP where `nohup` ignores it, so that the run outlives a terminal."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def interrupt_on_signals(*, ctrl_c: bool) -> None:
    """Raise Stopped on these signals; on Ctrl-C only if `ctrl_c`, which else stays Python's KeyboardInterrupt."""
    for number in stop_signals():
        if ctrl_c or number != signal.SIGINT:
            signal.signal(number, _hang_up if number == signal.SIGHUP else _stop)


@contextmanager
def noting_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether Ctrl-C has come, which is no KeyboardInterrupt meanwhile; a second one is.

    An exception is lost that comes while Python runs a finalizer, and leaves half done whatever it comes into.
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
    """The terminal is gone: the same as SIGTERM, for which recipes have a handler that saves."""
    signal.raise_signal(signal.SIGTERM)
