"""`Checkpointer(remote=)`: what is fetched from a remote store, and what is kept there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_shard as fs
from fsdp_shard.checkpoint import RemoteStore
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from tests.checkpoint.remotes import shelf


def _save(checkpointer: fs.Checkpointer, model: nn.Module, losses: dict[int, float]) -> None:
    """Save a step for each loss, with other weights in each."""
    for step, loss in losses.items():
        nn.init.constant_(next(model.parameters()), float(step))
        checkpointer.save(step, model, metrics={"loss": loss})
    checkpointer.wait()


def test_the_best_step_survives_the_loss_of_the_run_directory(tmp_path: Path) -> None:
    address, run_dir, model = shelf(tmp_path) + "/run", tmp_path / "run", nn.Linear(2, 1)
    with fs.Checkpointer(run_dir, monitor="loss", keep_last=1, remote=address) as checkpointer:
        _save(checkpointer, model, {1: 0.5, 2: 0.1, 3: 0.4})
    shutil.rmtree(run_dir)
    with fs.Checkpointer(run_dir, monitor="loss", keep_last=1, remote=address) as checkpointer:
        restored = checkpointer.restore(model)
        assert restored is not None
        assert restored.step == 3
        _save(checkpointer, model, {4: 0.9, 5: 0.8})
        assert (checkpointer.steps, checkpointer.best) == ([2, 5], 2)
    remote = RemoteStore(address)
    assert (remote.steps(), remote.best()) == ([2, 5], 2)


@pytest.mark.parametrize(("wanted", "step"), [("best", 2), (1, 1), ("latest", 4)])
def test_any_step_of_the_remote_store_can_be_restored(tmp_path: Path, wanted: int | str, step: int) -> None:
    address, run_dir, model = shelf(tmp_path) + "/run", tmp_path / "run", nn.Linear(2, 1)
    with fs.Checkpointer(run_dir, monitor="loss", remote=address) as checkpointer:
        _save(checkpointer, model, {1: 0.5, 2: 0.1, 4: 0.4})
    shutil.rmtree(run_dir)
    with fs.Checkpointer(run_dir, monitor="loss", remote=address) as checkpointer:
        restored = checkpointer.restore(model, step=wanted)
        assert restored is not None
        assert restored.step == step
        assert torch.equal(next(model.parameters()), torch.full((1, 2), float(step)))
        with pytest.raises(CheckpointError, match="has no step 3"):
            checkpointer.restore(model, step=3)


def test_steps_of_another_run_are_not_mixed_with_those_of_this_one(tmp_path: Path) -> None:
    address, model = shelf(tmp_path) + "/run", nn.Linear(2, 1)
    with fs.Checkpointer(tmp_path / "one", keep_last=1, remote=address) as checkpointer:
        _save(checkpointer, model, {1: 0.0, 2: 0.0})
    with fs.Checkpointer(tmp_path / "other", keep_last=1, remote=address) as checkpointer:
        with pytest.raises(SaveError, match=r"Step 7 was not saved: remote=.*/run has steps up to 2 .* restore\(\)"):
            _save(checkpointer, model, {7: 0.0})
        assert checkpointer.steps == []
    for step in (1, 7):  # before and after those of the other run
        with fs.Checkpointer(tmp_path / f"from-{step}", keep_last=1) as checkpointer:
            _save(checkpointer, model, {step: 0.0})
        with pytest.raises(ConfigError, match=rf"2 is of another run than .*step-0000000{step}: their run_id\.json "):
            fs.Checkpointer(tmp_path / f"from-{step}", keep_last=1, remote=address)
    assert RemoteStore(address).steps() == [2]


def test_steps_of_one_run_need_none_in_common(tmp_path: Path) -> None:
    address, run_dir, model = shelf(tmp_path) + "/run", tmp_path / "run", nn.Linear(2, 1)
    for remote, step in ((address, 1), (None, 2), (address, 3)):
        with fs.Checkpointer(run_dir, keep_last=1, remote=remote) as checkpointer:
            _save(checkpointer, model, {step: 0.0})
    assert RemoteStore(address).steps() == [3]
