"""Runs commands side by side and says what each cost: wall time, CPU time, peak memory. Imports nothing heavy.

The parent must stay small: Linux counts the memory of the process that forks into the peak of what it starts.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MB = 1_000_000

# Where it is set, what is installed still has its bytecode, and a checkout would be compiled in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@dataclass(frozen=True)
class Cost:
    """Of one whole process, or the medians of several: seconds, seconds of CPU, peak resident bytes.

    `inside` is what the process itself printed as JSON on its last line, for those that do.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: float
    inside: Mapping[str, float]

    def __str__(self) -> str:
        inside = f", of which {self.inside['seconds']:.3f} s inside" if "seconds" in self.inside else ""
        return f"{self.seconds:8.3f} s{inside}; CPU {self.cpu_seconds:.2f} s; peak {self.peak_bytes / MB:,.0f} MB"


def run(command: Sequence[str]) -> Cost:
    """Run a command to its end; RuntimeError with what it said if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            said = err.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}: {said}")
        out.seek(0)
        return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, _last_json(out.read()))


def _last_json(output: bytes) -> Mapping[str, float]:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def side_by_side(
    commands: Mapping[str, Sequence[str]], target: Path, repeats: int, source: Path | None = None
) -> dict[str, Cost]:
    """The medians of each command, all run once in each of `repeats` rounds, so that noise meets all of them.

    Each round begins with another command: a process that frees much memory leaves the next one pages that cost less.

    `target`, which the commands write, is deleted before and after each run; what is left to be written to the disk is
    written before the clock starts. `source` is read once, so that it lies in the page cache, and everything else
    beside `target` is put out of it: where memory is full of old files, each new page has to be wrung from them.
    """
    forget(target.parent)
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for number in range(repeats):
        turn = number % len(commands)
        for name in [*list(commands)[turn:], *list(commands)[:turn]]:
            shutil.rmtree(target, ignore_errors=True)
            if source is not None:
                warm(source)
            os.sync()
            found[name].append(run(commands[name]))
    shutil.rmtree(target, ignore_errors=True)
    return {name: _median(costs) for name, costs in found.items()}


def _median(costs: Sequence[Cost]) -> Cost:
    keys = costs[0].inside.keys()
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu_seconds for cost in costs),
        statistics.median(cost.peak_bytes for cost in costs),
        {key: statistics.median(cost.inside[key] for cost in costs) for key in keys},
    )


def forget(path: Path) -> None:
    """Let the page cache drop everything at `path`."""
    os.sync()
    for file in filter(Path.is_file, path.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(path: Path) -> None:
    """Read everything at `path` once."""
    buffer = bytearray(1 << 20)
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
