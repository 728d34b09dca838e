"""The progress of long work on standard error: a bar on a terminal, and elsewhere a line every so often."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from fsdp_shard.utils.printing import until_unread

_FIRST_SECONDS, _MOST_SECONDS = 2.0, 30.0  # before the first line, and between lines; in between it doubles


@contextmanager
def report_progress(
    total: int,
    title: str,
    unit: str = "",
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    enabled: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Report the progress of some work; of work that takes less than two seconds, nothing but a bar on a terminal.

    Args:
        total: What there is to do.
        title: What is done, such as the command.
        unit: What is counted, such as `windows`; B for bytes; empty to show the percentage only.
        stream: Where to write; standard error by default.
        clock: Returns the time in seconds.
        enabled: False reports nothing, as on all ranks but one.

    Yields:
        A function to call with what has been done since the last call, from any thread.
    """
    if not enabled:
        yield lambda done: None
        return
    stream, lock = stream or sys.stderr, threading.Lock()
    if stream.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=title, unit=unit, unit_scale=unit == "B", file=stream, leave=False) as bar:

            def advance(done: int) -> None:
                with lock:
                    bar.update(done)

            yield advance
        return
    lines = _Lines(total, title, unit, stream, clock)

    def count(done: int) -> None:
        with lock:
            lines.count(done)

    yield count


class _Lines:
    """Writes lines such as `evaluate: 120 of 313 windows, 38%, 0:00:12 left`."""

    def __init__(self, total: int, title: str, unit: str, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total, self._title, self._stream, self._clock = total, title, stream, clock
        self._of = f" of {total:,} {unit}, " if unit and unit != "B" else ""
        self._done, self._start, self._pause = 0, clock(), _FIRST_SECONDS
        self._next = self._start + self._pause

    def count(self, done: int) -> None:
        """Add what has been done, and write a line if it is time for one."""
        self._done += done
        now = self._clock()
        if now < self._next or self._done >= self._total:
            return
        self._pause = min(2 * self._pause, _MOST_SECONDS)
        self._next = now + self._pause
        left = timedelta(seconds=round((now - self._start) * (self._total - self._done) / max(self._done, 1)))
        counted = f"{self._done:,}{self._of}" if self._of else ""
        with until_unread(self._stream):
            print(f"{self._title}: {counted}{self._done / self._total:.0%}, {left} left", file=self._stream, flush=True)
