"""An address such as s3://bucket/a where only a local path will do is refused, and makes no directory `s3:`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fsdp_shard as fs
from fsdp_shard.cli.command_line import cp, report
from fsdp_shard.errors import ConfigError


def _write_config() -> None:
    config = fs.EvaluateConfig(checkpoint="a")
    config.run_dir = "s3://bucket/a"
    fs.write_config(config)


def _evaluate() -> None:
    config = fs.EvaluateConfig(checkpoint="a")
    config.data.path = "b"
    fs.run_evaluation(config, "s3://bucket/a")


CALLS: dict[str, Callable[[], object]] = {
    "directory": lambda: fs.save_pretrained(torch.nn.Linear(2, 1), "s3://bucket/a"),
    "run_dir": lambda: fs.write_result("s3://bucket/a", {}),
    "run_dir of a config": _write_config,
    "run_dir of an evaluation": _evaluate,
    "DEST": lambda: cp(["finetune", "s3://bucket/a"]),
    "--md": lambda: report([".", "--md", "s3://bucket/a"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_address_for_a_local_path_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = re.escape(f"{name.partition(' ')[0]}=s3://bucket/a is a remote address, but ")
    with pytest.raises(ConfigError, match=words):
        CALLS[name]()
    assert not any(tmp_path.iterdir())


def test_a_result_has_no_status_but_completed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"status='failed' of their own; give it another name"):
        fs.write_result(tmp_path, {"status": "failed"})
    assert not any(tmp_path.iterdir())
