"""Loops of one's own that are killed, asked to stop, and started again on other ranks: the scripts in `examples/`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import StepStore
from tests.end_to_end.killed_scripts import ForkedScript, kill_at_random, losses
from tests.support.commands import FSDP_SHARD, ROOT, run
from tests.support.tiny import save_model
from tests.support.torchrun import start_script

_STEPS = 12
_NUM_KILLS = 20 if os.environ.get("FAULTS") == "long" else 1  # of each script
_SCRIPTS = {"fsdp2_loop.py": (_STEPS,), "trainer.py": (), "accelerate_loop.py": ()}


def start(place: Path, run_dir: str, ranks: int = 2) -> subprocess.Popen[str]:
    script = ROOT / "examples" / "fsdp2_loop.py"
    return start_script(script, run_dir, "model", "text.txt", _STEPS, cwd=place, ranks=ranks)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a text of 72 rows for the Trainer and accelerate: whole batches in each epoch."""
    place = tmp_path_factory.mktemp("loop")
    save_model(place / "model")
    text = "".join(f"{number} green bottles hang on the wall. " for number in range(99))
    (place / "text.txt").write_text(text[: 72 * 32])
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, str]:
    """The losses of a run that nothing interrupts."""
    output = start(place, "whole").communicate(timeout=120)[0]
    found = losses(output)
    assert sorted(found) == list(range(1, _STEPS + 1)), output
    return found


@pytest.mark.long
@pytest.mark.parametrize("script", _SCRIPTS)
def test_nothing_is_lost_when_it_is_killed(script: str, place: Path, tmp_path: Path) -> None:
    def begin(run_dir: str) -> ForkedScript:
        given = ("model", "text.txt", *_SCRIPTS[script])
        return ForkedScript(ROOT / "examples" / script, tmp_path / run_dir, *given, cwd=place)

    began = time.monotonic()
    expected = losses(begin("whole").wait())
    seconds = time.monotonic() - began
    assert sorted(expected) == list(range(1, max(expected) + 1))
    found = kill_at_random(begin, tmp_path, expected, seconds, _NUM_KILLS)
    print(f"{script}: {found.number} kills, {found.in_saves} while a step was written, {len(found.lost)} lost")
    assert not found.lost


@pytest.mark.slow
def test_it_stops_when_it_is_asked_to_and_goes_on_with_other_ranks(place: Path, whole: dict[int, str]) -> None:
    process = start(place, "asked")
    assert process.stdout is not None
    head = ""
    while "step 2 " not in head:
        head += (line := process.stdout.readline())
        assert line, head
    process.send_signal(signal.SIGTERM)
    seen = losses(head + process.communicate(timeout=120)[0])
    assert StepStore(place / "asked" / "checkpoints").latest() == max(seen), "the step at which it was asked"
    again = losses(start(place, "asked", ranks=3).communicate(timeout=120)[0])
    assert sorted(again) == list(range(max(seen) + 1, _STEPS + 1))
    assert [float(again[step]) for step in again] == pytest.approx([float(whole[step]) for step in again], abs=1e-5)
    said = run([*FSDP_SHARD, "generate", "checkpoint=asked", "prompt=one green", "generation.max_new_tokens=4"], place)
    assert said.status == 0, said.err
