"""A copy of `recipes/finetune.py` with an optimizer of one's own and a frozen layer: trained, resumed, described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdp_shard import open_checkpoint
from tests.support.commands import Done, fsdp_shard
from tests.support.tiny import save_model

OPTIMIZER = "        optimizer = fs.build_optimizer(config.optim, loaded.model, context, loaded.adapter)\n"
SHARD = "            sharded = config.shard.shard(unfilled.module, context)\n"
OWN = '''
class Counting(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["t"] = self.state[param].get("t", 0) + 1


'''


def _copy(directory: Path, name: str, optimizer: str) -> None:
    assert fsdp_shard("cp", "finetune", name, cwd=directory).status == 0
    text = (directory / name).read_text()
    assert text.count(OPTIMIZER) == text.count(SHARD) == 1
    text = text.replace(OPTIMIZER, f"        optimizer = {optimizer}(loaded.model.module.parameters(), lr=1e-3)\n")
    frozen = "            unfilled.module.model.layers[0].requires_grad_(False)\n"
    text = text.replace(SHARD, frozen + SHARD).replace("@fs.recipe(", f"import torch\n{OWN}\n@fs.recipe(", 1)
    (directory / name).write_text(text)


def _run(directory: Path, name: str, run_dir: str, steps: int) -> Done:
    settings = ["model.path=model", "data.path=text.txt", "data.sequence_length=16", "launch.device=cpu"]
    settings += ["shard.param_dtype=float32", "train.schedule=constant", f"run_dir={run_dir}", f"train.steps={steps}"]
    return fsdp_shard("run", name, *settings, cwd=directory)


@pytest.mark.long
def test_what_people_change(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("an optimizer and a layer of one's own. " * 40)
    _copy(tmp_path, "mine.py", "torch.optim.Adagrad")
    first = _run(tmp_path, "mine.py", "parts", 2)
    assert first.status == 0, first.err
    assert "frozen: 9 of 20 tensors" in first.err
    assert (
        (tmp_path / "parts/config.yaml")
        .read_text()
        .startswith("# To repeat this run: fsdp-shard run mine.py THIS_FILE")
    )
    assert _run(tmp_path, "mine.py", "parts", 4).status == 0, "Adagrad makes its state as it is built"
    assert _run(tmp_path, "mine.py", "whole", 4).status == 0
    parts, whole = (
        [json.loads(row)["loss"] for row in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("parts", "whole")
    )
    assert parts == whole
    with open_checkpoint(tmp_path / "parts") as after, open_checkpoint(tmp_path / "model") as before:
        changed = {name for name in before.names if not torch.equal(after.read(name), before.read(name))}
    assert changed
    assert not any("layers.0." in name for name in changed)


@pytest.mark.long
def test_a_state_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("an optimizer of one's own. " * 40)
    _copy(tmp_path, "counting.py", "Counting")
    done = _run(tmp_path, "counting.py", "run", 2)
    assert done.status == 1
    assert "Counting cannot be saved: it keeps " in done.err
    assert "=1 in its state, which is not a tensor and would be lost in a resume" in done.err
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))
