"""A request to stop, from outside: SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 (Slurm's warning before a time limit).

The first signal only sets a flag. The loop tells all ranks of it at the end of the step, so that every rank stops after
the same one and a checkpoint can be saved. A second signal ends this rank at once.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from fsdp_shard.errors import Interrupted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Context in which the stop signals are caught; `number` is the one that came, 0 before. For the main thread.

    A launcher passes Ctrl-C on to ranks that the terminal has told already: what comes within `grace_seconds` of the
    first signal is the same request.
    """

    def __init__(self, grace_seconds: float = 2.0) -> None:
        self.number = 0
        self._grace_seconds = grace_seconds
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > self._grace_seconds:
            name = signal.Signals(number).name
            raise Interrupted(f"A second signal ({name}) ended the run at once, without a save.", signal_number=number)
