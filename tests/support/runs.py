"""Run a shipped recipe as a user does, in a process of its own that begins with everything imported."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fsdp_shard.cli import load_recipe, run_as_program, run_command

RECIPES = Path(__file__).parent.parent.parent / "recipes"
_FORK = multiprocessing.get_context("fork")
_FRAMES = 12


@dataclass(frozen=True)
class Ended:
    """What a run left: exit status, standard output and error, and the directory it ran in."""

    status: int
    out: str
    err: str
    run_dir: Path

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "result.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics]

    @property
    def checkpoint(self) -> Path:
        return Path(self.result["checkpoint"])


def run_recipe(command: str, run_dir: Path, *overrides: str, timeout_seconds: float = 240) -> Ended:
    """`fsdp-shard COMMAND run_dir=... OVERRIDES`, to its end, whatever that is."""
    started = Started(command, run_dir, *overrides)
    return started.wait(timeout_seconds)


def run_arguments(arguments: list[str], timeout_seconds: float = 120) -> Ended:
    """`fsdp-shard ARGUMENTS` in a forked process, to its end."""
    with TemporaryDirectory() as directory:
        process = _FORK.Process(target=_command, args=(arguments, directory))
        process.start()
        process.join(timeout_seconds)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        out, err = ((Path(directory) / name).read_text() for name in ("out", "err"))
        return Ended(process.exitcode, out, err, Path(directory))


class Started:
    """A recipe that runs; `pid` is the process that a user would have started."""

    def __init__(self, command: str, run_dir: Path, *overrides: str) -> None:
        self.run_dir = run_dir
        self._directory = TemporaryDirectory()
        arguments = [f"run_dir={run_dir}", *overrides]
        load_recipe(RECIPES / f"{command}.py")  # once, here: every process that is forked has it
        self._process = _FORK.Process(target=_program, args=(command, arguments, self._directory.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def wait(self, timeout_seconds: float = 240) -> Ended:
        self._process.join(timeout_seconds)
        alive = self._process.is_alive()
        stacks = ""
        if alive:
            processes = _with_children(self.pid)
            stacks = _stacks(processes, Path(self._directory.name))
            for process in processes:
                _send(signal.SIGKILL, process)
            self._process.join()
        out, err = ((Path(self._directory.name) / name).read_text() for name in ("out", "err"))
        self._directory.cleanup()
        assert not alive, f"still running after {timeout_seconds} s\n" + "\n".join([out, err, stacks])
        assert self._process.exitcode is not None
        return Ended(self._process.exitcode, out, err, self.run_dir)


def _send(number: signal.Signals, process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _stacks(processes: list[int], directory: Path) -> str:
    """Where the threads of the processes of a run that hangs are: the last calls of each."""
    texts = []
    for process in processes:
        (directory / "stacks").write_text("")
        _send(signal.SIGUSR2, process)
        time.sleep(0.3)
        threads = (directory / "stacks").read_text().split("\n\n")
        texts += [f"process {process}", *("\n".join(thread.splitlines()[:_FRAMES]) for thread in threads)]
    return "\n".join(texts)


def _with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in _with_children(int(child)))]


def _after_fork() -> None:
    """What tests/support/ranks.py does in a rank: nothing that the parent left is collected, and torch has a new pool.

    Else threads of autograd, which a torch with CUDA starts beside fake tensors even where there is no GPU, may each
    replace the pool of the parent at the same moment, and torch aborts: "Invalid thread pool!".
    """
    gc.freeze()
    torch.set_num_threads(1)


def _program(command: str, arguments: list[str], directory: str) -> None:
    _after_fork()
    stacks = os.open(Path(directory) / "stacks", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)  # also in the ranks that are forked from here
    _redirect(directory)
    main = load_recipe(RECIPES / f"{command}.py")
    run_as_program(lambda: main.run(arguments, command), debug="debug=true" in arguments)


def _command(arguments: list[str], directory: str) -> None:
    _after_fork()
    _redirect(directory)
    run_as_program(lambda: run_command(arguments), debug=False)


def _redirect(directory: str) -> None:
    """Let this process write to the files `out` and `err`."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(directory) / name, os.O_CREAT | os.O_WRONLY, 0o600), number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
