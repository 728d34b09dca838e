"""Runs a check in a process of its own: the GPU is new to it, what it leaves is gone, and it can be ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.gpu.device import IS_REHEARSAL, Device, gpu_names, open_device
from tests.gpu.table import Row

_SAID = 4000  # characters of a traceback


class NotInstalledError(Exception):
    """A package that a check needs is not there."""


@dataclass
class Bench:
    """What a check gets: the device, a directory for all checks, and where figures go.

    Attributes:
        directory: A directory that all checks share.
        out: Where rows are sent as soon as they are known.
    """

    directory: Path
    out: Connection | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> Device:
        """The GPU, or its stand-in."""
        return open_device()

    def record(
        self,
        check: str,
        value: float | None,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
        exact: bool = False,
    ) -> None:
        """Record a figure of the table; in a rehearsal its limits hold only if it is `exact`, on any device."""
        row = Row(check, value, unit, at_most, at_least, note, counts=exact or not IS_REHEARSAL)
        self.rows.append(row)
        if self.out is not None:
            self.out.send(row)

    def has(self, check: str, package: str) -> bool:
        """Whether a package is installed; else the row of `check` says that it is not."""
        if find_spec(package) is None:
            self.record(check, None, note=f"{package} is not installed")
            return False
        return True

    def size(self, on_gpu: int, rehearsed: int) -> int:
        """A number that is smaller in a rehearsal."""
        return rehearsed if IS_REHEARSAL else on_gpu


@dataclass(frozen=True)
class Ended:
    """How a child ended: its rows, its seconds, and what is wrong, or nothing."""

    rows: list[Row]
    seconds: float
    problem: str


def find_gpus() -> tuple[str, list[str]]:
    """How to start processes that use GPUs, and the names of the GPUs, from such a process.

    `fork`, unless this process has used a GPU, which then cannot be used in those that it forks; then `spawn`.
    """
    names = _probe("fork")
    return ("fork", names) if names is not None else ("spawn", _probe("spawn") or [])


def _probe(method: str) -> list[str] | None:
    """The names of the GPUs, from another process; None if it cannot use them, or does not answer."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_name_gpus, args=(sender,))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(120) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _name_gpus(out: Connection) -> None:
    try:
        out.send(gpu_names())
    except RuntimeError:
        out.send(None)


class Child:
    """The process of a check, which calls `function(bench, **arguments)` as soon as it is told to.

    Args:
        function: The check.
        arguments: What it gets.
        method: How processes are started: `fork` or `spawn`.
        warm: Whether it uses the GPU before, which takes 15 seconds. Then it must not fork others that use it.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], method: str, *, warm: bool) -> None:
        context: Any = multiprocessing.get_context(method)
        self._pipe, other = context.Pipe()
        task = function.__module__, function.__name__, arguments, other, warm
        self._process = context.Process(target=_main, args=task, name=f"{method}:check")  # `apart` starts its own alike
        self._process.start()
        self._began: float | None = None
        other.close()

    def go(self) -> float:
        """Let the check begin, if it has not; return when it began, from where its seconds count."""
        if self._began is None:
            self._began = time.monotonic()
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended; `finish` reads why
                self._pipe.send("go")
        return self._began

    def finish(self, limit_seconds: float) -> Ended:
        """Wait until the check has ended, and end it with all that it started when it has run `limit_seconds`."""
        began = self.go()
        rows: list[Row] = []
        problem: str | None = None
        try:
            while problem is None:
                # What ran beside others may have said all it has to say before it is asked.
                left = max(began + limit_seconds - time.monotonic(), 0.0)
                if not self._pipe.poll(left):
                    problem = f"overran its limit of {limit_seconds:.0f} s and was ended"
                    break
                message = self._pipe.recv()
                if isinstance(message, Row):
                    rows.append(message)
                else:
                    problem = str(message)
            self._process.join(5 if not problem else 0)
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            problem = f"its process ended with status {self._process.exitcode} and said nothing"
        finally:
            self.kill()
        return Ended(rows, time.monotonic() - began, problem)

    def kill(self) -> None:
        """End it, and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def run_check(function: Callable[..., Any], arguments: dict[str, Any], limit_seconds: float, method: str) -> Ended:
    """Call `function(bench, **arguments)` in a child, which is ended with all that it started after `limit_seconds`."""
    return Child(function, arguments, method, warm=False).finish(limit_seconds)


def _main(module: str, name: str, arguments: dict[str, Any], pipe: Connection, warm: bool) -> None:
    os.setsid()
    try:
        check = getattr(import_module(module), name)
        if warm:
            open_device().warm()
        else:
            _share_cores()
        pipe.recv()
        check(**(arguments | {"bench": Bench(arguments["bench"].directory, pipe)}))
        said = ""
    except NotInstalledError as error:
        said = f"not installed: {error}"
    except BaseException:
        said = traceback.format_exc()[-_SAID:]
    pipe.send(said)
    pipe.close()
    os._exit(0)  # nothing of a broken GPU is waited for


def _share_cores() -> None:
    """Use a part of the cores, here and in what this process starts: more threads than cores are slow under OpenMP."""
    number = max(1, len(os.sched_getaffinity(0)) // 8)
    os.environ["OMP_NUM_THREADS"] = str(number)
    torch.set_num_threads(number)


def in_turn(*calls: tuple[Any, ...]) -> list[Any]:
    """What each `(function, *arguments)` returns; what one leaves on the GPU is freed before the next."""
    answers = []
    for function, *arguments in calls:
        answers.append(function(*arguments))
        open_device().reset()
    return answers


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns in a process of its own, which takes its memory with it.

    For a check that has not used the GPU itself, and so may fork.
    """
    context: Any = multiprocessing.get_context(multiprocessing.current_process().name.partition(":")[0])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(function, arguments, sender), name=multiprocessing.current_process().name
    )
    process.start()
    sender.close()
    try:
        value, problem = receiver.recv()
    except EOFError:
        process.join(5)
        value, problem = None, f"{function.__name__} ended with status {process.exitcode} and said nothing"
    process.kill()
    process.join()
    if problem:
        raise RuntimeError(problem)
    return value


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], out: Connection) -> None:
    try:
        answer = function(*arguments), ""
    except BaseException:
        answer = None, traceback.format_exc()[-_SAID:]
    out.send(answer)
    out.close()
    os._exit(0)
