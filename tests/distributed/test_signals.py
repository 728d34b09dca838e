"""Signals that ask a run to stop, where Python swallows the exception that a handler raises."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.commands import run

_FINALIZER = """
import os, signal, sys, time
from fsdp_shard.distributed.signals import Stopped, interrupt_on_signals

class Freed:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
        for _ in range(1000): pass

interrupt_on_signals(ctrl_c=CTRL_C)
freed = Freed()
del freed
try:
    time.sleep(60)
except (Stopped, KeyboardInterrupt) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "ctrl_c", "raised"),
    [(signal.SIGTERM, True, "Stopped"), (signal.SIGINT, True, "Stopped"), (signal.SIGINT, False, "KeyboardInterrupt")],
)
def test_a_signal_in_a_finalizer_is_not_lost(number: int, ctrl_c: bool, raised: str, tmp_path: Path) -> None:
    script = _FINALIZER.replace("NUMBER", str(int(number))).replace("CTRL_C", str(ctrl_c))
    done = run([sys.executable, "-c", script], tmp_path)
    assert (done.status, done.out, done.err) == (0, f"{raised}\n", "")


def test_other_errors_in_finalizers_are_shown(tmp_path: Path) -> None:
    script = _FINALIZER.replace("os.kill(os.getpid(), NUMBER)", "1 / 0").replace("CTRL_C", "True").replace("60", "0.1")
    done = run([sys.executable, "-c", script], tmp_path)
    assert done.status == 0
    assert "ZeroDivisionError" in done.err
