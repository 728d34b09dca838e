"""Two real ranks that save small steps whose every value is the step's number, so that a mixture of steps shows.

The ranks are forked and meet over gloo. With `asynchronous`, a step is copied and written behind the back of the main
thread, which changes the state as soon as it may, as training does.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_shard.checkpoint import (
    FAULTS,
    OPTIMIZER,
    TRAINER,
    Staging,
    StepContent,
    StepStore,
    open_checkpoint,
    save_step,
    verify,
)
from fsdp_shard.distributed import DistributedContext, LocalShard, init_distributed, run_on_all, run_on_main
from fsdp_shard.training import BackgroundSave
from fsdp_shard.utils import read_json

WORLD_SIZE = 2
# Whether `make faults` runs the suite: the same faults, more often.
LONG = os.environ.get("FAULTS") == "long"
_FORK = multiprocessing.get_context("fork")
_SHAPES = {"embed.weight": (3, 100_001), "norm.weight": (7,), "head.weight": (5, 11)}  # one crosses chunks of 1 MiB
_SMALL = {"embed.weight": (3, 101), "norm.weight": (7,), "head.weight": (5, 11)}
_CONFIG = b'{"model_type": "lamma"}'


class State:
    """A rank's half of every tensor."""

    def __init__(self, rank: int, *, small: bool = False) -> None:
        shapes = _SMALL if small else _SHAPES
        self.weights = {name: _half(shape, rank) for name, shape in shapes.items()}
        self.optimizer = {f"{name}.exp_avg": _half(shape, rank) for name, shape in shapes.items()}

    def set(self, step: int) -> StepContent:
        """The whole state after `step`."""
        for shard in (*self.weights.values(), *self.optimizer.values()):
            shard.data.fill_(float(step))
        files = {"config.json": _CONFIG, TRAINER: json.dumps({"step": step}).encode()}
        return StepContent(self.weights, {}, self.optimizer, files)


def _half(shape: tuple[int, ...], rank: int) -> LocalShard:
    total = int(np.prod(shape))
    start, end = total * rank // WORLD_SIZE, total * (rank + 1) // WORLD_SIZE
    data = torch.zeros(end - start)
    return LocalShard(torch.nn.Parameter(data), data, start, shape, True)


def save_on(
    context: DistributedContext,
    root: Path,
    steps: range,
    *,
    layout: str,
    asynchronous: bool = False,
    keep_last: int = 2,
    small: bool = False,
    saved: Callable[[int], None] = lambda step: None,
) -> None:
    """Save `steps` one after the other, and delete old ones; `saved(step)` is called when one is said to be safe."""
    store, state, staging = StepStore(root), State(context.rank, small=small), Staging()
    beside = context.with_new_group(20)  # gloo may not notice at once that a rank was killed
    run_on_main(context, store.clean_leftovers)

    def write(step: int, whole: StepContent) -> Path:
        size = 400_000 if layout == "gathered" else None
        directory = save_step(beside, store, step, whole, layout=layout, max_shard_bytes=size)
        run_on_all(beside, lambda: store.prune(keep_last) if context.is_main else None)
        return directory

    for step in steps:
        whole = state.set(step)
        if asynchronous:
            staged, copy = staging.stage(whole)
            running = BackgroundSave(step, copy, partial(write, step, staged))
            copy.copy_remaining()
            state.set(-step)  # what the next optimizer step does to the weights
            running.outcome.result()
        else:
            write(step, whole)
        saved(step)


def kill_at(monkeypatch: pytest.MonkeyPatch, point: str, victim: int) -> None:
    """Have rank `victim` be killed where it reaches `point` the second time: the first step has nothing to delete."""
    reached: list[str] = []

    def hook(name: str) -> None:
        reached.append(name)
        if name == point and os.environ["RANK"] == str(victim) and reached.count(point) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(FAULTS, "hook", hook)


def in_fork(function: Callable[..., Any], *args: Any, seconds: float = 200) -> Any:
    """What `function(*args)` returns in a process of its own, which begins with everything imported."""
    receiver, sender = _FORK.Pipe(duplex=False)

    def work() -> None:
        gc.freeze()  # as in tests/support/ranks.py
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            sender.send((function(*args), ""))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    process = _FORK.Process(target=work)
    process.start()
    sender.close()
    try:
        assert receiver.poll(seconds), f"no answer within {seconds} s"
        value, error = receiver.recv()
        assert not error, error
        return value
    finally:
        process.kill()
        process.join()


class Ranks:
    """`function(context, *args)` on forked ranks that may die; nothing is expected of how they end."""

    def __init__(self, place: Path, function: Callable[..., None], *args: Any) -> None:
        meeting = place / f"meeting-{time.monotonic_ns()}"
        self._processes = [
            _FORK.Process(target=_rank_main, args=(rank, meeting, function, args)) for rank in range(WORLD_SIZE)
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def wait(self, seconds: float) -> list[int]:
        """Exit statuses, negative for signals; a rank that is still there after `seconds` fails the test."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
        late = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        for process in self._processes:
            process.kill()
            process.join()
        assert not late, f"rank(s) {late} were still there after {seconds} s"
        return [process.exitcode or 0 for process in self._processes]


def _rank_main(rank: int, meeting: Path, function: Callable[..., None], args: Any) -> None:
    gc.freeze()  # as in tests/support/ranks.py
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(rank))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a rank that loses the other says so, at length
    status = 1
    try:
        with init_distributed("cpu", timeout_seconds=60, rendezvous=f"file://{meeting}") as context:
            function(context, *args)
        status = 0
    finally:
        os._exit(status)


def problems(root: Path, at_least: int = 0) -> list[str]:
    """What breaks the promise: a committed step that is not whole or not of one save, or a step that was lost."""
    store, found = StepStore(root), []
    steps = store.steps()
    if max(steps, default=0) < at_least:
        found.append(f"step {at_least} was said to be safe, but of it only {steps} are there")
    for step in steps:
        directory = store.path(step)
        try:
            report = verify(directory)
            found += [f"step {step}: {problem}" for problem in report.problems]
            if read_json(directory / TRAINER) != {"step": step}:
                found.append(f"step {step}: trainer.json is of another step")
            for part in (directory, directory / OPTIMIZER):
                with open_checkpoint(part) as index:
                    for name in index.names:
                        values = np.empty(int(np.prod(index.entry(name).shape)), dtype=np.float32)
                        index.read_into(name, 0, values.data.cast("B"))
                        if not (values == step).all():
                            found.append(f"step {step}: {name} in {part.name} has values of other steps")
        except Exception as error:
            found.append(f"step {step}: {type(error).__name__}: {error}")
    return found
