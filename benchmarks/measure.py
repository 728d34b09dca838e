"""Runs commands side by side and says what each cost: wall time, CPU time, peak memory. Imports nothing heavy.

The parent must stay small: Linux counts the memory of the process that forks into the peak of what it starts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    Each round has an order of its own, as what a process leaves in memory decides what pages cost the next one.

    `target`, which the commands write, is deleted before and after each run; what is left to be written to the disk is
    written before the clock starts. `source` is read once, so that it lies in the page cache, and everything else
    beside `target` is put out of it: where memory is full of old files, each new page has to be wrung from them.
    """
    forget(target.parent)
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for number in range(repeats):
        for name in random.Random(number).sample(list(commands), len(commands)):
            shutil.rmtree(target, ignore_errors=True)
            if source is not None:
                warm(source)
            os.sync()
            found[name].append(run(commands[name]))
    shutil.rmtree(target, ignore_errors=True)
    return {name: median(costs) for name, costs in found.items()}


def median(costs: Sequence[Cost]) -> Cost:
    """The median of each figure."""
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu_seconds for cost in costs),
        statistics.median(cost.peak_bytes for cost in costs),
        {key: statistics.median(cost.inside[key] for cost in costs) for key in costs[0].inside},
    )


@contextmanager
def kept_memory(num_bytes: float) -> Iterator[None]:
    """Meanwhile so much memory stays with this machine when it is freed; nearly all, if it is that little.

    A virtual machine may give free blocks of some MiB back to its host, which gives them again page by page to whoever
    writes there first: that takes seconds for a GB, meets `cp` or us by chance, and hits two threads harder. So a
    process uses that memory once, and then holds one page of every 4 MiB of it, which leaves room for large pages.
    """
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEP, str(int(num_bytes))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert keeper.stdout is not None
    try:
        if keeper.stdout.readline() != b"kept\n":
            raise RuntimeError(f"{num_bytes / MB:,.0f} MB could not be kept; see above")
        yield
    finally:
        keeper.communicate()


_KEEP = """
import mmap, sys
free = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) << 10
stride = 4 << 20
num_bytes = max(min(int(sys.argv[1]), free // 10 * 9) // stride, 1) * stride
memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, num_bytes, mmap.PAGESIZE):
    memory[start] = 1
for start in range(0, num_bytes, stride):
    memory.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, stride - mmap.PAGESIZE)
print("kept", flush=True)
sys.stdin.read()
"""


@contextmanager
def memory_limit(num_bytes: float) -> Iterator[list[str]]:
    """What to put before a command so that the kernel gives it and its page cache no more; nothing where it cannot be.

    A control group of its own, version 1 or 2, inside the one that this process is in.
    """
    for mounted, limit, members in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "tasks"),
        ("/sys/fs/cgroup", "memory.max", "cgroup.procs"),
    ):
        group = Path(mounted) / f"fsdp-shard-benchmark-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(int(num_bytes)))
                yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / members)]
                return
        finally:
            group.rmdir()
    yield []


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
