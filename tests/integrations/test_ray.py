"""`finetune` on the workers of Ray Train: the script in examples/, one of whose workers is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.train", reason="ray[train] is not installed; scripts/peers makes an environment that has it")

from fsdp_shard import verify
from fsdp_shard.checkpoint import StepStore
from fsdp_shard.errors import ConfigError
from fsdp_shard.integrations import ray_finetune
from tests.support.commands import FSDP_SHARD, ROOT, environment, run

_SETTINGS = ["train.steps=24", "checkpoint.every=4", "data.sequence_length=32", "launch.device=cpu"]


def _losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step; of the last time, where one was done again."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _kill_a_worker(process: subprocess.Popen[str], store: StepStore) -> int:
    """SIGKILL for one worker once a step is saved; returns the step."""
    deadline = time.monotonic() + 200
    while store.latest() is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [one for one in psutil.Process(process.pid).children(recursive=True) if "RayTrainWorker" in one.name()]
    assert len(workers) == 2, workers
    workers[1].kill()
    latest = store.latest()
    assert latest is not None
    return latest


def test_a_worker_that_is_lost_costs_no_step(tmp_path: Path, tiny_model: Path, texts: Path) -> None:
    text = texts / "held_out.txt"
    paths = [f"model.path={tiny_model}", f"data.path={text}"]
    variables = {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    whole = run([*FSDP_SHARD, "finetune", *paths, *_SETTINGS, "launch.ranks=2", "run_dir=whole"], tmp_path, **variables)
    assert whole.status == 0, whole.err
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "ray_train.py"), "ray", str(tiny_model), str(text), *_SETTINGS],
        cwd=tmp_path,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    store = StepStore(tmp_path / "ray" / "run" / "checkpoints")
    try:
        killed_at = _kill_a_worker(process, store)
        output = process.communicate(timeout=250)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert killed_at < 24, "it was killed before the end"
    assert "resumed from " in output
    result: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith('{"final_loss"')))
    assert _losses(tmp_path / "ray" / "run") == _losses(tmp_path / "whole"), "each step has the loss without a failure"
    assert result["final_loss"] == json.loads((tmp_path / "whole" / "result.json").read_text())["final_loss"]
    assert Path(result["checkpoint"]) == tmp_path / "ray" / "ray" / "step-00000024"
    assert verify(result["checkpoint"]).is_sound


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "train_loop_config has nothing; ray_finetune takes settings alone"),
        ({"settings": [], "lr": 1}, "train_loop_config has settings, lr; ray_finetune takes settings alone"),
        ({"settings": ["train.steps=1"]}, "run_dir is not among the settings"),
        ({"settings": ["run_dir=here"]}, "run_dir=here is relative"),
    ],
)
def test_wrong_use_is_one_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ray_finetune(config)
