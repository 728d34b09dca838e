"""What users get wrong: one `error:` paragraph that says what to do, exit status 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run_recipe
from tests.support.tiny import llama_config


def _no_model(root: Path) -> str:
    (root / "nothing").mkdir()
    return f"model.path={root}/nothing"


def _no_weights(root: Path) -> str:
    llama_config().save_pretrained(root / "config-only")
    return f"model.path={root}/config-only"


def _empty(root: Path) -> str:
    (root / "empty.txt").touch()
    return f"data.path={root}/empty.txt"


def _file(root: Path) -> str:
    (root / "file").write_text("")
    return f"run_dir={root}/file/run"


CASES = {
    "a run directory below a file": (_file, ["run_dir=", "/file/run cannot be written", "/file is a file"]),
    "unknown key": (lambda _: "train.stepz=3", ["train.stepz", "train.steps"]),
    "unknown group": (lambda _: "shrad=fsdp1", ["shrad", "shard"]),
    "unknown option": (lambda _: "shard=fsdp3", ["fsdp3", "fsdp2"]),
    "out of range": (lambda _: "train.steps=0", ["train.steps=0", "at least 1"]),
    "wrong type": (lambda _: "optim.lr=fast", ["optim.lr", "fast"]),
    "not a choice": (lambda _: "checkpoint.layout=shared", ["checkpoint.layout=shared", "sharded"]),
    "missing data file": (lambda root: f"data.path={root}/missing.txt", ["missing.txt"]),
    "empty data file": (_empty, ["empty.txt", "empty"]),
    "a directory that is no model": (_no_model, ["nothing", "config.json"]),
    "a model without weights": (_no_weights, ["config-only", "no weights"]),
    "no such model": (lambda root: f"model.path={root}/missing", ["missing", "does not exist"]),
    "batch that ranks cannot share": (
        lambda _: "train.global_batch_size=7",
        ["train.global_batch_size=7", "2 data-parallel ranks", "would fit"],
    ),
    "replicas that ranks cannot form": (lambda _: "shard.replicas=3", ["shard.replicas=3", "2 ranks"]),
    "a GPU that is not there": (lambda _: "launch.device=cuda", ["launch.device=cuda", "GPU"]),
    "a step to resume from that is not there": (lambda root: f"resume={root}/missing", ["resume=", "does not exist"]),
    "a size that is none": (lambda _: "checkpoint.max_shard_size=big", ["checkpoint.max_shard_size=big", "200MB"]),
    "a size that nothing would use": (lambda _: "checkpoint.max_shard_size=1GB", ["checkpoint.layout=gathered"]),
    "no such class of blocks": (lambda _: "shard.blocks=[LlamaDecodeLayer]", ["LlamaDecoderLayer"]),
    "offload on the CPU": (lambda _: "shard.cpu_offload=true", ["shard.cpu_offload=true", "GPU"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error(case: str, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    make, words = CASES[case]
    good = [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        "launch.ranks=2",
        "train.steps=1",
    ]
    ended = run_recipe("finetune", tmp_path / "run", *good, make(tmp_path))
    assert ended.status == 2, ended.err
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) == 1, ended.err
    for word in words:
        assert word in ended.err
    assert not (tmp_path / "run").exists(), "nothing may be written before the input is known to be good"


def test_ranks_that_a_batch_script_of_slurm_starts_are_checked_for(
    tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the variables of a task too, but nobody else would check."""
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    good = [f"model.path={tiny_model}", f"data.path={texts}/train.txt", "launch.ranks=2", "train.steps=1"]
    ended = run_recipe("finetune", tmp_path / "run", *good, "train.global_batch_size=7")
    assert ended.status == 2, ended.err
    assert ended.err.startswith("error: train.global_batch_size=7"), ended.err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_late_leaves_no_directory(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": "good"}\n{"text": "b", "label": "other"}\n')
    given = [f"model.path={tiny_model}", f"data.path={tmp_path}/rows.jsonl", f"data.cache_dir={tmp_path}/cache"]
    given += ["model.task=sequence_classification", "model.labels=[good,bad]", "train.steps=1"]
    ended = run_recipe("finetune", tmp_path / "runs" / "one", *given)
    assert (ended.status, "other" in ended.err) == (2, True), ended.err
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback(tiny_model: Path, tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path, f"model.path={tiny_model}", "data.path=missing.txt", "debug=true")
    assert ended.status == 2
    assert "Traceback (most recent call last)" in ended.err


@pytest.mark.parametrize("override", ["launch.device=cuda", "launch.max_restarts=3", "launch.ranks=2", "seed=1"])
def test_a_command_that_starts_no_ranks_refuses_how_to_start_them(
    override: str, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = [f"source={tiny_model}", f"target={tmp_path}/target", override]
    ended = run_recipe("convert", tmp_path / "run", *arguments)
    assert ended.status == 2
    assert f"{override} has no effect: convert does not use it" in ended.err
    assert not (tmp_path / "target").exists()
