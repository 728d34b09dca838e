"""A loop of one's own that is killed, asked to stop, and started again on other ranks: the script in `examples/`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fsdp_shard import verify
from fsdp_shard.checkpoint import Store
from tests.support.commands import FSDP_SHARD, ROOT, run
from tests.support.tiny import save_model
from tests.support.torchrun import kill_all, start_script

_STEPS = 12
_NUM_KILLS = 20 if os.environ.get("FAULTS") == "long" else 2
_LINE = re.compile(r"^step (\d+) loss ([\d.]+)$", re.M)


def start(place: Path, run_dir: str, ranks: int = 2) -> subprocess.Popen[str]:
    script = ROOT / "examples" / "fsdp2_loop.py"
    return start_script(script, run_dir, "model", "text.txt", _STEPS, cwd=place, ranks=ranks)


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in _LINE.findall(output)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loop")
    save_model(place / "model")
    (place / "text.txt").write_text("".join(f"{number} green bottles hang on the wall. " for number in range(99)))
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, str]:
    """The losses of a run that nothing interrupts."""
    output = start(place, "whole").communicate(timeout=120)[0]
    found = losses(output)
    assert sorted(found) == list(range(1, _STEPS + 1)), output
    return found


def test_nothing_is_lost_when_it_is_killed(place: Path, whole: dict[int, str]) -> None:
    seen: dict[int, str] = {}
    store = Store(place / "killed" / "checkpoints")
    for number in range(_NUM_KILLS):
        before = store.latest()
        process = start(place, "killed")
        time.sleep(random.Random(number).uniform(4.0, 12.0))
        kill_all(process.pid)
        seen |= losses(process.communicate()[0])
        assert (store.latest() or 0) >= (before or 0)
        for step in store.steps():
            assert verify(store.path(step)).is_sound
    output = start(place, "killed").communicate(timeout=120)[0]
    seen |= losses(output)
    assert store.latest() == _STEPS, output
    assert seen == whole, "each step of each part has the loss that it has without a kill"
    said = run([*FSDP_SHARD, "generate", "checkpoint=killed", "prompt=one green", "generation.max_new_tokens=4"], place)
    assert said.status == 0, said.err


def test_it_stops_when_it_is_asked_to_and_goes_on_with_other_ranks(place: Path, whole: dict[int, str]) -> None:
    process = start(place, "asked")
    assert process.stdout is not None
    head = ""
    while "step 2 " not in head:
        head += (line := process.stdout.readline())
        assert line, head
    process.send_signal(signal.SIGTERM)
    seen = losses(head + process.communicate(timeout=120)[0])
    assert Store(place / "asked" / "checkpoints").latest() == max(seen), "the step at which it was asked"
    again = losses(start(place, "asked", ranks=3).communicate(timeout=120)[0])
    assert sorted(again) == list(range(max(seen) + 1, _STEPS + 1))
    assert [float(again[step]) for step in again] == pytest.approx([float(whole[step]) for step in again], abs=1e-5)
