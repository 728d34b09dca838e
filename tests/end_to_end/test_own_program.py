"""The stages of `finetune` in a program of its own, in ranks that torchrun starts, with a config composed in Python."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import fsdp_shard as fs
from tests.support.commands import run
from tests.support.torchrun import start_script

_PROGRAM = """
import os
import sys
import fsdp_shard as fs

config = fs.compose_config(fs.FinetuneConfig, [setting for setting in sys.argv[1:] if setting != "seed=RANK"])
fs.check_finetune(config)
if "seed=RANK" in sys.argv:
    config.seed = int(os.environ["RANK"])
with fs.start_run(config) as start:
    data = fs.open_data(config, start)
    with fs.build_unfilled(config, start) as unfilled:
        loaded = unfilled.load(config.shard.shard(unfilled.module, start.context), config.seed)
    optimizer = fs.build_optimizer(config.optim, loaded.model, start.context, loaded.adapter)
    run = fs.open_run(config, start, loaded, optimizer, data.train)
    with (
        fs.open_log(config, run, start, loaded, data.notes) as log,
        fs.open_saver(config, run, start, loaded, log) as saver,
    ):
        for report in fs.train(run):
            log.step(report)
        saver.save(run.state)
        saver.finish()
        fs.finish_run(config, run, loaded, log)
"""


def _losses(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.long
def test_it_trains_as_the_command_does(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    settings = [f"model.path={tiny_model}", f"data.path={texts}/held_out.txt", "data.sequence_length=16"]
    settings += ["train.steps=3", "launch.device=cpu", "shard.param_dtype=float32", "shard=fsdp1", "optim=sgd"]
    ranks = start_script(tmp_path / "program.py", *settings, "run_dir=own", cwd=tmp_path)
    said = ranks.communicate(timeout=200)[0]
    assert ranks.returncode == 0, said
    assert "on 2 cpu ranks, FSDP1" in said
    fs.finetune([*settings, f"run_dir={tmp_path}/command", "launch.ranks=2"])
    assert _losses(tmp_path / "own") == _losses(tmp_path / "command")
    assert fs.verify(tmp_path / "own", against=tmp_path / "command").is_sound


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=RANK", "Rank 1 on .* has seed=1, but rank 0 has seed=0; start all ranks with the same settings."),
        ("launch.ranks=3", "launch.ranks=3, but 2 ranks have been started, 2 of them on this machine"),
    ],
)
def test_ranks_must_be_those_of_one_run(
    setting: str, message: str, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    """With seeds of their own, ranks train on some samples twice and on others never."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    settings = [f"model.path={tiny_model}", f"data.path={texts}/held_out.txt", "data.sequence_length=16"]
    ranks = start_script(tmp_path / "program.py", *settings, "launch.device=cpu", setting, cwd=tmp_path)
    said = ranks.communicate(timeout=200)[0]
    assert ranks.returncode == 1
    assert re.search(message, said), said


@pytest.mark.long
@pytest.mark.parametrize("setting", ["launch.ranks=2", "launch.max_restarts=1"])
def test_a_single_process_starts_no_ranks(setting: str, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    settings = [f"model.path={tiny_model}", f"data.path={texts}/held_out.txt", "launch.device=cpu", setting]
    done = run([sys.executable, "program.py", *settings], tmp_path)
    assert f"ConfigError: {setting} has no effect: this process is the only rank" in done.err
