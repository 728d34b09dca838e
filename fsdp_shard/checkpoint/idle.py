"""Work that takes of the cores only what nobody else wants: training leaves some, as ranks wait for each other. Knows
nothing of what is done.

Linux has threads for it (SCHED_IDLE, see sched(7)); elsewhere the work is done as any other. Where others keep all
cores busy, such a thread gets next to nothing, and whoever waits for what it holds (a lock, the interpreter's among
them) waits for long. So it is watched: once it does not get on, the thread that asked for the work does what is left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress

_PATIENCE_SECONDS = 0.25  # for a piece: many times what it takes, and little to wait for once


def at_idle(pieces: Iterator[object]) -> None:
    """Do all `pieces`, of some milliseconds each; returns when they are done, or raises what one of them did."""
    worker = _Worker(pieces)
    worker.start()
    while worker.is_alive():
        before = worker.num_done
        worker.join(_PATIENCE_SECONDS)
        worker.is_relieved = worker.is_relieved or worker.num_done == before
    if worker.error is not None:
        raise worker.error
    at_once(pieces)


def at_once(pieces: Iterator[object]) -> None:
    """Do all `pieces` here and now."""
    for _ in pieces:
        pass


class _Worker(threading.Thread):
    def __init__(self, pieces: Iterator[object]) -> None:
        super().__init__(name=f"{threading.current_thread().name}-idle", daemon=True)
        self._pieces = pieces
        self.num_done = 0
        self.is_relieved = False  # another thread does the rest
        self.error: BaseException | None = None

    def run(self) -> None:
        _leave_cores_to_others()
        try:
            for _ in self._pieces:
                self.num_done += 1
                if self.is_relieved:
                    break
        except BaseException as error:  # raised by the thread that waits for this one
            self.error = error


def _leave_cores_to_others() -> None:
    """Of this thread, for good: only privileged ones may take it back."""
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # a sandbox may allow no such calls
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
