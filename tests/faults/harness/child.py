"""What one child of the warm process does: it builds a case and runs commands on it, watched."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_shard.cli import print_error
from fsdp_shard.errors import FsdpShardError
from tests.faults.corpus.case import Case
from tests.faults.harness.commands import Command
from tests.faults.harness.outcome import Outcome

_MOST_BYTES = 2 << 30  # a bomb ends here, so that the machine does not
# What a command may import at its first use, besides what is imported before.
_ALLOWED_IMPORTS = {"fsdp_shard", "tests", "fsdp_shard_recipe"}


def run(case: Case, place: Path, chosen: Sequence[str], commands: dict[str, Command]) -> Iterator[Outcome]:
    """Build the case below `place`, and yield how each of the chosen commands ends on it.

    Several cases may run in one child, one after the other, each in a directory of its own.
    """
    outside = place / "case"
    outside.mkdir(parents=True)
    (outside / "secret").write_text("secret")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = case.build(outside / "model")
    path = built if isinstance(built, Path) else outside / "model"
    watch = Watch(outside, outside / "model")
    os.chdir(place)
    for number, name in enumerate(chosen):
        work = place / f"work-{number}"
        work.mkdir()
        outcome = _measured(name, partial(commands[name], path, work), watch, place)
        outcome.root = str(outside / "model")
        yield outcome
        shutil.rmtree(work, ignore_errors=True)
    watch.close()


def _measured(name: str, call: Callable[[], None], watch: Watch, place: Path) -> Outcome:
    outcome = Outcome(name)
    memory, seconds = _reset_peak(), _cpu_seconds()
    watch.reset()
    with _output(place / "said") as said:
        try:
            call()
            outcome.status = 0
        except SystemExit as error:
            outcome.status = int(error.code or 0) if isinstance(error.code, int | None) else 1
        except BaseException as error:
            outcome.status = _status(error)
            outcome.error = str(error) if outcome.status else _where(error)
            # A command's own last words; what it raised without any is no clear error, whatever is printed of it.
            print_error(error, debug=False)
    outcome.said = said.read_text(encoding="utf-8", errors="replace")
    outcome.cpu_seconds = round(_cpu_seconds() - seconds, 3)
    outcome.growth_bytes = _peak() - memory
    outcome.harm = watch.found(writes_inside=name == "resume")
    return outcome


def _where(error: BaseException) -> str:
    """What was raised, the last lines of ours that it went through, and where it began."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/fsdp_shard/" in frame.filename][-3:]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in [*ours, *frames[-1:]]]
    return f"{type(error).__name__}: {str(error)[:500]} <- {' < '.join(reversed(lines))}"


def _status(error: BaseException) -> int | None:
    if isinstance(error, FsdpShardError) and not getattr(error, "traceback", ""):
        return error.exit_status
    # The operating system's errors that name the file are printed as `FILE: what is wrong`.
    return 1 if isinstance(error, OSError) and error.filename is not None and error.strerror else None


@contextlib.contextmanager
def _output(file: Path) -> Iterator[Path]:
    """Have everything that is printed go to a file, by libraries without Python too."""
    descriptor = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND, 0o600)
    kept = [os.dup(1), os.dup(2)]
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(descriptor)


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak() -> int:
    """Of this process, or of a child that it waited for, which began as large as this one was."""
    return max(_status_bytes("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def limit_memory() -> None:
    """Let this process end by a MemoryError before it takes what the machine has."""
    limit = _status_bytes("VmData") + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Watch:
    """Sees requests, imports of what was not imported before, kernels asked for, and files opened outside."""

    def __init__(self, outside: Path, inside: Path) -> None:
        self._outside, self._inside = str(outside), str(inside)
        self._before = _snapshot(outside)
        self._known = _packages()
        self._kernel_calls = outside.parent / "kernel-calls"
        os.environ["KERNEL_CALLS"] = str(self._kernel_calls)
        self._seen: list[str] = []
        self._is_open = True
        sys.addaudithook(self._hear)  # which stays as long as the process
        socket.socket.connect = self._refuse("connect")  # type: ignore[method-assign]  # in this process alone
        socket.getaddrinfo = self._refuse("getaddrinfo")

    def close(self) -> None:
        self._is_open = False

    def reset(self) -> None:
        self._seen.clear()
        self._kernel_calls.unlink(missing_ok=True)

    def found(self, *, writes_inside: bool) -> list[str]:
        harm = list(dict.fromkeys(self._seen))
        if self._kernel_calls.exists():
            harm += [f"kernels: {line}" for line in self._kernel_calls.read_text().splitlines()]
        harm += [f"import {name}" for name in sorted(_packages() - self._known - _ALLOWED_IMPORTS)]
        now = _snapshot(Path(self._outside))
        changed = sorted({path for path, _ in now.items() ^ self._before.items()})
        harm += [f"changed {path}" for path in changed if not (writes_inside and path.startswith(f"{self._inside}/"))]
        self._before = now
        return harm

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_open and event == "open" and isinstance(arguments[0], str):
            file = os.path.abspath(arguments[0])
            if file.startswith(f"{self._outside}/") and not (file + "/").startswith(f"{self._inside}/"):
                self._seen.append(f"opened {file}")

    def _refuse(self, name: str) -> Callable[..., Any]:
        def refused(*arguments: Any, **named: Any) -> Any:
            self._seen.append(f"{name}: {arguments[-1] if name == 'connect' else arguments[:1]}")
            raise OSError(f"no request is allowed: {name}")

        return refused


def _packages() -> set[str]:
    return {name.split(".")[0] for name in sys.modules}


def _snapshot(place: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory of the case."""
    states = ((str(path), path.lstat()) for path in place.rglob("*"))
    return {path: (0, 0) if stat.S_ISDIR(of.st_mode) else (of.st_mtime_ns, of.st_size) for path, of in states}


def encode(outcome: Outcome) -> bytes:
    return json.dumps(outcome.to_dict()).encode() + b"\n"
