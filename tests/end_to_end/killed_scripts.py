"""Scripts on real ranks that are killed at random moments until they are done, and what each kill has left.

The ranks are forked with what torchrun sets, so that they begin with everything imported: most of a short run is then
training and saving, which is where a kill is to come.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fsdp_shard import verify
from fsdp_shard.checkpoint import StepStore
from tests.support.commands import hear_signals

_FORK = multiprocessing.get_context("fork")
_LINE = re.compile(r"^step (\d+) loss ([\d.]+)$", re.M)


def losses(output: str) -> dict[int, str]:
    """The loss of each step that a script has printed."""
    return {int(step): loss for step, loss in _LINE.findall(output)}


class ForkedScript:
    """`torchrun --nproc-per-node RANKS SCRIPT ARGUMENTS`, without a launcher and its imports."""

    def __init__(self, script: Path, *arguments: object, cwd: Path, ranks: int = 2) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self._outputs = [cwd / f"rank-{time.monotonic_ns()}-{rank}.txt" for rank in range(ranks)]
        given = [str(script), *map(str, arguments)]
        self._ranks = [
            _FORK.Process(target=_rank_main, args=(rank, ranks, port, given, cwd, output))
            for rank, output in enumerate(self._outputs)
        ]
        for process in self._ranks:
            process.start()

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have come to their end, or one has failed: the others may wait for it for half an hour."""
        ends = [process.exitcode for process in self._ranks]
        return None not in ends or any(ends)

    def wait(self, seconds: float = 120) -> str:
        """What they print up to their end, which must be a good one."""
        deadline = time.monotonic() + seconds
        for process in self._ranks:
            process.join(max(deadline - time.monotonic(), 0))
        ends = [process.exitcode for process in self._ranks]
        output = self.kill()
        assert set(ends) == {0}, f"exit statuses {ends}\n{output}"
        return output

    def kill(self) -> str:
        """End all ranks at once, if they are still there; what they have printed."""
        for process in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
        for process in self._ranks:
            process.join()
        return "".join(path.read_text(errors="replace") for path in self._outputs if path.exists())


def _rank_main(rank: int, ranks: int, port: int, given: list[str], cwd: Path, output: Path) -> None:
    gc.freeze()  # as in tests/support/ranks.py
    torch.set_num_threads(1)
    warnings.simplefilter("default")  # those of a script are no errors
    hear_signals()
    os.chdir(cwd)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1)  # noqa: SIM115
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    sys.argv = given
    if "accelerate" in sys.modules:  # another test may have made its state in the process that this one was forked from
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_path(given[0], run_name="__main__")


@dataclass
class Kills:
    """What came of them.

    Attributes:
        number: The kills.
        in_saves: Those that came while a step was written.
        lost: What was wrong afterwards: a step that had been complete and is gone or damaged, or another loss.
    """

    number: int = 0
    in_saves: int = 0
    lost: list[str] = field(default_factory=list)


def kill_at_random(
    start: Callable[[str], ForkedScript], place: Path, expected: dict[int, str], seconds: float, number: int
) -> Kills:
    """Start a run again and again, each time with a kill at a random moment, and let it come to its end at last.

    The first, third, ... kill waits for the next save, and comes at a random moment of it. A run that is done is
    followed by a new one in another directory, as long as there are kills left.

    Args:
        start: Starts the script with the name of its run directory.
        place: Where the run directories lie.
        expected: The loss of each step of a run that nothing interrupts.
        seconds: How long that run has taken.
        number: The kills.
    """
    moments, found, runs = random.Random(number), Kills(), 0
    while found.number < number:
        runs += 1
        name, seen = f"killed-{runs}", dict[int, str]()
        store = StepStore(place / name / "checkpoints")
        while found.number < number:
            began, moment, in_save = time.time(), moments.uniform(0.2, 1.0) * seconds, found.number % 2 == 0
            script = start(name)
            while not script.has_ended and (time.time() - began < moment or (in_save and not _is_saving(store, began))):
                time.sleep(0.001)
            if script.has_ended:
                seconds = min(seconds, time.time() - began)  # the machine is faster than it was
                seen |= losses(script.wait())
                break
            if in_save:
                time.sleep(moments.uniform(0, 0.02))
            before = store.latest()
            seen |= losses(script.kill())
            found.number += 1
            found.in_saves += _is_saving(store, began)
            found.lost += [f"kill {found.number}: {problem}" for problem in _problems(store, before)]
        else:
            seen |= losses(start(name).wait())
        if store.latest() != max(expected) or any(seen[step] != expected.get(step) for step in seen):
            found.lost.append(f"{name} came to step {store.latest()} with {seen} in place of {expected}")
    return found


def _is_saving(store: StepStore, since: float) -> bool:
    """Whether a step is being written, or was when its writer was killed; what an earlier kill has left is older."""
    with suppress(FileNotFoundError):  # it may just be committed
        return any(path.stat().st_ctime >= since for path in store.root.glob(".*.partial"))
    return False


def _problems(store: StepStore, before: int | None) -> list[str]:
    """What breaks the promise once everything is killed, where `before` was the last complete step."""
    found = [] if (store.latest() or 0) >= (before or 0) else [f"step {before} is gone"]
    return found + [f"step {step} is damaged" for step in store.steps() if not verify(store.path(step)).is_sound]
