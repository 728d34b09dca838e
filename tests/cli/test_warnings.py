"""What a run says first of settings that whoever starts it should think about twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp_shard.config import COMMANDS, FinetuneConfig
from fsdp_shard.utils import walk, warnings_of
from tests.support.commands import ROOT, run
from tests.support.runs import run_recipe


def test_settings_that_run_code_of_others_have_a_warning() -> None:
    assert warnings_of(FinetuneConfig()) == []
    for schema in COMMANDS.values():
        for name, field, _ in walk(schema()):
            runs_code = name.endswith("trust_remote_code") or name in ("lm_eval.include_path", "lm_eval.cache")
            assert runs_code == bool(field.metadata.get("warning")), name


@pytest.mark.long
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


@pytest.mark.long
def test_of_ranks_that_others_started_one_says_so(tmp_path: Path) -> None:
    """One checks, too, and says what is wrong; the other hears of that and says nothing."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    settings = [f"checkpoint={tmp_path}/none", "prompt=x", "dispatch.trust_remote_code=true"]
    ended = run([*torchrun, ROOT / "recipes" / "generate.py", *settings], tmp_path, OMP_NUM_THREADS="1")
    assert ended.status != 0
    assert ended.err.count("warning: dispatch.trust_remote_code=true") == 1, ended.err
    assert ended.err.count("error: ") == 1, ended.err
