"""What a run says first of settings that whoever starts it should think about twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_shard.config import COMMANDS, FinetuneConfig
from fsdp_shard.utils import walk, warnings_of
from tests.support.runs import run_recipe


def test_settings_that_run_code_of_others_have_a_warning() -> None:
    assert warnings_of(FinetuneConfig()) == []
    for schema in COMMANDS.values():
        for name, field, _ in walk(schema()):
            runs_code = name.endswith("trust_remote_code") or name == "lm_eval.include_path"
            assert runs_code == bool(field.metadata.get("warning")), name


def test_a_run_that_trusts_code_of_others_says_so_once(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    trusts = "trust_remote_code=true"
    trained = run_recipe(
        "finetune",
        tmp_path / "run",
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path}/tokens",
        "data.sequence_length=64",
        "train.steps=1",
        "train.global_batch_size=2",
        "train.micro_batch_size=1",
        "launch.ranks=2",
        "launch.device=cpu",
        "checkpoint.optimizer=false",
        f"model.{trusts}",
    )
    asked = run_recipe("generate", tmp_path / "text", f"checkpoint={tmp_path}/none", "prompt=x", f"dispatch.{trusts}")
    assert trained.status == 0, trained.err
    assert asked.status == 2
    for ended, name in ((trained, "model"), (asked, "dispatch")):
        lines = [line for line in ended.err.splitlines() if "warning" in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"warning: {name}.{trusts}: Python files that come with the model run on every rank")


def test_of_ranks_that_others_started_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank does not come further than its config, which is wrong, and then waits for the first one to say so."""
    from fsdp_shard.cli import recipes

    monkeypatch.setattr(recipes, "_SECONDS_TO_REPORT", 0.0)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    settings = [f"checkpoint={tmp_path}/none", "prompt=x", "dispatch.trust_remote_code=true"]
    ended = run_recipe("generate", tmp_path / "text", *settings)
    assert "warning" not in ended.err
    assert "error: rank 1: " in ended.err, "as the first had nothing to say"
