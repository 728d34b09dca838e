"""Files of a step that are damaged or gone: found by `verify`, and a run that would go on from them is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import verify
from fsdp_shard.cli import load_recipe
from fsdp_shard.config import FinetuneConfig, compose_jobs
from fsdp_shard.errors import FsdpShardError
from tests.faults.counts import count
from tests.faults.saves import LONG, in_fork
from tests.support.runs import RECIPES, Ended, run_recipe

_NUM_FLIPS = 500 if LONG else 50  # of each layout


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path_factory.mktemp('tokens')}",
        "data.sequence_length=16",
        "train.global_batch_size=2",
        "shard.param_dtype=float32",
        "launch.device=cpu",
    ]


@pytest.fixture(scope="module", params=["sharded", "gathered"])
def saved(request: pytest.FixtureRequest, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of one step by two ranks."""
    run_dir = tmp_path_factory.mktemp("runs") / request.param
    layout = f"checkpoint.layout={request.param}"
    ended = run_recipe("finetune", run_dir, *settings, "train.steps=1", "launch.ranks=2", layout)
    assert ended.status == 0, ended.err
    return ended


def _go_on(settings: list[str], run_dirs: list[Path]) -> list[str]:
    """What a run of two steps says to each of the directories: an error, or nothing when it went on."""
    recipe, said = load_recipe(RECIPES / "finetune.py"), []
    for run_dir in run_dirs:
        (job,) = compose_jobs(FinetuneConfig, [*settings, f"run_dir={run_dir}", "train.steps=2"], "finetune")
        try:
            recipe.check(job.config)
            recipe.work(job.config)
            said.append("")
        except FsdpShardError as error:
            said.append(str(error))
    return said


def _files(step: Path) -> list[str]:
    return sorted(str(file.relative_to(step)) for file in step.rglob("*") if file.is_file())


def _copy(saved: Ended, target: Path) -> Path:
    """The run's directory, as it was before its result was written; returns the copy of its step."""
    shutil.copytree(saved.run_dir, target)
    (target / "result.json").unlink()
    return target / saved.checkpoint.relative_to(saved.run_dir)


@pytest.mark.long
def test_a_step_without_one_of_its_files_is_refused(saved: Ended, settings: list[str], tmp_path: Path) -> None:
    names = _files(saved.checkpoint)
    assert len(names) > 6
    for name in names:
        (_copy(saved, tmp_path / name.replace("/", "_")) / name).unlink()
    _copy(saved, tmp_path / "whole")
    run_dirs = [*(tmp_path / name.replace("/", "_") for name in names), tmp_path / "whole"]
    said = in_fork(_go_on, settings, run_dirs)
    assert said[-1] == "", "it is sound but for what is removed"
    for name, error in zip(names, said, strict=False):
        count("a file of a step removed", failed=not error)
        assert error, f"{name} was not missed"


@pytest.mark.long
def test_every_flipped_bit_is_found(saved: Ended, settings: list[str], tmp_path: Path) -> None:
    chance = random.Random(saved.run_dir.name)
    step = _copy(saved, tmp_path / "flipped")
    names = _files(step)
    for number in range(_NUM_FLIPS):
        file = step / names[number % len(names)]
        whole = file.read_bytes()
        position, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        found = not verify(step).is_sound
        count("a bit flipped, found by verify", failed=not found)
        assert found, (file.name, position, bit)
        if number < _NUM_FLIPS // (1 if LONG else 5):
            said = in_fork(_go_on, settings, [tmp_path / "flipped"])
            count("a bit flipped, found by resume", failed=not said[0])
            assert said[0], (file.name, position, bit)
        file.write_bytes(whole)
    assert verify(step).is_sound
