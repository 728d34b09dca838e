"""SIGKILL while steps are saved: at each named point, and at any moment; of one rank, the other, or both.

One directory is used from kill to kill, so that each run begins with what the one before left behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import POINTS, StepStore
from fsdp_shard.distributed import DistributedContext
from tests.faults.counts import count
from tests.faults.saves import LONG, Ranks, kill_at, problems, save_on

_WAYS = [("sharded", False), ("gathered", False), ("sharded", True), ("gathered", True)]
_REACHED = [point for point in POINTS if point not in ("verified", "slimmed")]
_MAIN_POINTS = ("begun", "manifest-written", "directory-synced", "renamed", "committed", "pointed", "hidden", "deleted")
_RANDOM_KILLS = 59 if LONG else 9  # each way
_SECONDS_TO_END = 40.0  # more than the timeout of the group that saves


def _trial(place: Path, layout: str, asynchronous: bool, kill: Callable[[Ranks, Path], None]) -> list[str]:
    """Save from the last step on until `kill` has done its work; what is then wrong."""
    root, told = place / "checkpoints", place / "told"
    first = (StepStore(root).latest() or 0) + 1

    def say(step: int) -> None:
        descriptor = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{step}\n".encode())
        os.close(descriptor)

    def work(context: DistributedContext) -> None:
        steps = range(first, first + 1000)
        save_on(context, root, steps, layout=layout, asynchronous=asynchronous, saved=say)

    ranks = Ranks(place, work)
    kill(ranks, told)
    assert 0 not in ranks.wait(_SECONDS_TO_END), "no rank can have come to its end"
    safe = max(map(int, told.read_text().split()), default=0) if told.exists() else 0
    return problems(root, at_least=safe)


@pytest.mark.parametrize(("layout", "asynchronous"), _WAYS if LONG else [_WAYS[1], _WAYS[2]])
def test_a_kill_at_each_point(layout: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in _REACHED:
        if point == "staged" and not asynchronous:
            continue
        for victim in (0,) if point in _MAIN_POINTS or not LONG else (0, 1):
            kill_at(monkeypatch, point, victim)
            wrong = _trial(tmp_path, layout, asynchronous, lambda ranks, told: None)
            count(
                f"SIGKILL at a point, {layout}, {'asynchronous' if asynchronous else 'synchronous'}", failed=bool(wrong)
            )
            assert not wrong, (point, victim, wrong)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "asynchronous"), _WAYS)
def test_a_kill_at_any_moment(layout: str, asynchronous: bool, tmp_path: Path) -> None:
    chance = random.Random(f"{layout} {asynchronous}")
    for number in range(_RANDOM_KILLS):
        victims = [(0, 1), (0,), (1,)][number % 3]

        def kill(ranks: Ranks, told: Path, victims: tuple[int, ...] = victims) -> None:
            before = told.stat().st_size if told.exists() else 0
            deadline = time.monotonic() + 60
            while (told.stat().st_size if told.exists() else 0) == before:  # until the first step of this run
                assert time.monotonic() < deadline, "no step was saved"
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.1))  # some saves
            for rank in victims:
                os.kill(ranks.pids[rank], signal.SIGKILL)

        wrong = _trial(tmp_path, layout, asynchronous, kill)
        count(
            f"SIGKILL at any moment, {layout}, {'asynchronous' if asynchronous else 'synchronous'}", failed=bool(wrong)
        )
        assert not wrong, (number, victims, wrong)
