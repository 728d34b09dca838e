"""Run commands as a user does: in a process of their own, away from the checkout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OWN_RECIPE = Path(__file__).with_name("own_recipe.py")

FSDP_SHARD = (sys.executable, "-m", "fsdp_shard")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Done:
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one paragraph on standard error; anything beside it fails the test."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


def environment() -> dict[str, str]:
    """Ours, with the checkout importable from anywhere and nothing that says we are a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    others = (*ranks, "PYTHONUNBUFFERED")  # with which no output is held that could fail at exit
    kept = {name: value for name, value in os.environ.items() if name not in others and not name.startswith("SLURM")}
    # The second is said by Python 3.12 and newer where ranks are forked.
    warnings = "default,ignore:This process:DeprecationWarning"
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": warnings}


def hear_signals() -> None:
    """In a process before its program starts: undo what the tests' own starter, such as nohup or `&`, has ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> Done:
    """Run `command` in `cwd` to its end."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def fsdp_shard(*arguments: str | Path, cwd: Path) -> Done:
    """`fsdp-shard ARGUMENTS`."""
    return run([*FSDP_SHARD, *arguments], cwd)
