"""TRL's SFTTrainer with `CheckpointerCallback`: the script in `examples/`, killed and started again."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed; scripts/peers makes an environment that has it")

from fsdp_shard import verify
from fsdp_shard.checkpoint import StepStore
from tests.support.commands import ROOT
from tests.support.torchrun import kill_all, start_script

pytestmark = pytest.mark.timeout(900)  # four starts, each with all that TRL imports

_SCRIPT = ROOT / "examples" / "trl_sft.py"
_LAST = 18


def train(place: Path, run_dir: str, trained: str, text: Path, *, ranks: int = 2) -> None:
    """Run the script to its end."""
    process = start_script(_SCRIPT, run_dir, "model", text, trained, cwd=place, ranks=ranks)
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 0, output


def losses(run_dir: Path) -> list[float]:
    """The loss of each step, as the state of the Trainer in the last one has them."""
    path = StepStore(run_dir / "checkpoints").path(_LAST) / "trainer_state.json"
    logged = [entry for entry in json.loads(path.read_text())["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, _LAST + 1))
    return [entry["loss"] for entry in logged]


@pytest.mark.parametrize(("trained", "other_ranks"), [("full", 3), ("lora", 1)])
def test_what_is_killed_goes_on_as_if_nothing_had_been(
    trained: str, other_ranks: int, tmp_path: Path, tiny_model: Path, texts: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    text = texts / "held_out.txt"
    train(tmp_path, "whole", trained, text)
    whole = losses(tmp_path / "whole")
    assert whole[-1] < whole[0] - 0.01, "it learns"

    process = start_script(_SCRIPT, "killed", "model", text, trained, cwd=tmp_path)
    store = StepStore(tmp_path / "killed" / "checkpoints")
    while (store.latest() or 0) < 6:
        assert process.poll() is None
        time.sleep(0.002)
    kill_all(process.pid)
    process.communicate()
    assert (store.latest() or 0) < _LAST
    shutil.copytree(tmp_path / "killed", tmp_path / "others")

    train(tmp_path, "killed", trained, text)
    assert losses(tmp_path / "killed") == whole, "bit by bit"
    train(tmp_path, "others", trained, text, ranks=other_ranks)
    assert losses(tmp_path / "others") == pytest.approx(whole, abs=2e-6)
    assert all(verify(store.path(step)).is_sound for step in store.steps())
    assert (tmp_path / "killed" / "adapter" / "adapter_model.safetensors").is_file() == (trained == "lora")
