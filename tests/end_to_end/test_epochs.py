"""`train.epochs` on real ranks: its steps, what is told about them, and runs that are resumed."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import open_checkpoint
from fsdp_shard.training import TrainConfig, TrainerState, is_finished
from tests.support.digests import tensor_digests
from tests.support.runs import Ended, run_recipe

NUM_ROWS = 10


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("rows")
    rows = [{"instruction": f"Say {number}.", "output": "x" * number} for number in range(1, NUM_ROWS + 1)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "train.global_batch_size=4",
        "train.warmup_steps=2",
        "optim.lr=3e-3",
        "shard.param_dtype=float32",
        "data.sequence_length=128",
        "data.kind=instruction",
        "launch.device=cpu",
        f"model.path={tiny_model}",
        f"data.path={directory}/rows.jsonl",
        f"data.cache_dir={directory}/cache",
    ]


@pytest.fixture(scope="module")
def whole(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two and a half epochs, which 4 does not divide."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return train(run_dir, *settings, "train.epochs=2.5", "checkpoint.every=3", "launch.ranks=2")


def train(run_dir: Path, *overrides: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *overrides)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
def test_steps_epochs_and_tokens_are_told(whole: Ended, settings: list[str], tmp_path: Path) -> None:
    assert "train.epochs=2.5 of 10 samples: 7 steps" in whole.err
    rows, result = whole.metrics, whole.result
    assert [row["epoch"] for row in rows] == [step * 4 / NUM_ROWS for step in range(1, 8)]
    assert [row["total_tokens"] for row in rows] == list(accumulate(row["tokens"] for row in rows))
    assert (result["steps"], result["max_steps"], result["epoch"]) == (7, 7, 2.8)
    assert result["tokens"] == rows[-1]["total_tokens"]
    assert f"step 7/7  epoch 2.80  loss {rows[-1]['loss']:.4f}" in whole.err
    assert f"{result['tokens']} tokens  " in whole.err
    assert f"done: 7 steps, 2.8 epochs, {result['tokens']} tokens" in whole.err
    steps = train(tmp_path, *settings, "train.steps=7", "checkpoint.every=3", "launch.ranks=2")
    assert "train.epochs" not in steps.err
    kept = ("loss", "learning_rate", "epoch", "total_tokens")
    assert [[row[name] for name in kept] for row in steps.metrics] == [[row[name] for name in kept] for row in rows]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-0000000{step}" for step in (3, 6, 7)
    ]


@pytest.mark.long
def test_a_resumed_run_equals_a_whole_one(whole: Ended, settings: list[str], tmp_path: Path) -> None:
    half = f"resume={whole.run_dir}/checkpoints/step-00000003"
    rest = train(tmp_path / "rest", *settings, "train.epochs=2.5", half, "launch.ranks=2")
    assert "train.epochs=2.5 of 10 samples: 7 steps" in rest.err
    kept = ("step", "loss", "learning_rate", "epoch", "tokens", "total_tokens")
    assert [[row[name] for name in kept] for row in rest.metrics] == [
        [row[name] for name in kept] for row in whole.metrics[3:]
    ]
    figures = ("steps", "max_steps", "epoch", "tokens")
    assert [rest.result[name] for name in figures] == [whole.result[name] for name in figures]
    with open_checkpoint(rest.checkpoint) as one, open_checkpoint(whole.checkpoint) as other:
        assert tensor_digests(one) == tensor_digests(other)
    halved = train(tmp_path / "other", *settings, "train.epochs=2.5", half, "train.global_batch_size=2")
    assert (halved.result["steps"], halved.result["epoch"]) == (3 + 7, 2.6), "13 samples were left"


@pytest.mark.long
def test_a_run_goes_on_with_more_epochs(settings: list[str], tmp_path: Path) -> None:
    first = train(tmp_path, *settings, "train.epochs=1")
    result, metrics = first.result, first.metrics
    assert (result["steps"], result["epoch"]) == (3, 1.2)
    for fewer in ("train.epochs=1", "train.epochs=0.5 train.warmup_steps=1", "train.steps=3"):
        again = train(tmp_path, *settings, *fewer.split())
        assert again.result == result
        assert "is finished after step 3" in again.err
        assert ("train.epochs to more than 1.2;" in again.err) == ("epochs" in fewer)
    longer = train(tmp_path, *settings, "train.epochs=2")
    assert (longer.result["steps"], longer.result["max_steps"], longer.result["epoch"]) == (5, 5, 2.0)
    assert longer.metrics[:3] == metrics
    path = longer.checkpoint / "trainer.json"
    assert json.loads(path.read_text())["samples_per_epoch"] == NUM_ROWS


def test_whether_an_older_run_is_finished_the_data_tells(tmp_path: Path) -> None:
    """Checkpoints of before have no `samples_per_epoch`."""
    state = TrainerState(seed=0, data="d", step=3, num_samples=12)
    (tmp_path / "result.json").write_text("{}")
    for samples_per_epoch, epochs, expected in ((None, 1.0, False), (10, 1.0, True), (10, 1.3, False)):
        state.samples_per_epoch = samples_per_epoch
        (tmp_path / "trainer.json").write_text(state.to_json())
        assert is_finished(tmp_path, str(tmp_path), TrainConfig(epochs=epochs, global_batch_size=4)) is expected


@pytest.mark.long
def test_what_does_not_fit_is_told_by_every_rank(settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, "train.epochs=2", "train.warmup_steps=6", "launch.ranks=2")
    assert ended.status == 2, ended.err
    assert "error: train.warmup_steps=6 is not less than train.epochs=2, which is 5 steps, so" in ended.err


def test_streams_have_no_epoch(settings: list[str], tmp_path: Path) -> None:
    cached = [setting for setting in settings if not setting.startswith("data.cache_dir")]
    ended = train(tmp_path, *cached, "train.steps=3", "data.streaming=true")
    assert [row["epoch"] for row in ended.metrics] == [None] * 3
    assert (ended.result["epoch"], ended.result["tokens"]) == (None, ended.metrics[-1]["total_tokens"])
    assert "  epoch " not in ended.err
