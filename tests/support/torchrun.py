"""Ranks of torchrun: a script that it starts, as a user would, its sudden end, and what it sets for a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.commands import environment, hear_signals


def start_script(script: Path, *arguments: object, cwd: Path, ranks: int = 2) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node RANKS SCRIPT ARGUMENTS`; both outputs of all ranks are in `stdout`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*launcher, str(script), *map(str, arguments)],
        cwd=cwd,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_signals,
    )


def kill_all(pid: int) -> None:
    """Kill a launcher and its ranks, which are in sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for number in (pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def as_by_torchrun() -> None:
    """Set what accelerate looks for beside the process group that this rank has."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", OMP_NUM_THREADS="1")
