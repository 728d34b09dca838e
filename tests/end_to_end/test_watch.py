"""What the finetune recipe does while nobody watches: best steps, early stopping, losses that are not finite."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

import fsdp_shard as fs
from fsdp_shard.checkpoint import StepStore, open_checkpoint
from fsdp_shard.training import StepReport, TrainingRun
from tests.support.digests import tensor_digests
from tests.support.event_files import scalars
from tests.support.runs import Started, run_recipe


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "train.schedule=constant",
        "train.eval_windows=16",
        "shard.param_dtype=float32",
        "data.sequence_length=32",
        "launch.device=cpu",
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.eval_path={texts}/held_out.txt",
        f"data.cache_dir={tmp_path_factory.mktemp('tokens')}",
    ]


@pytest.mark.long
def test_the_best_step_is_kept_and_the_run_stops_early(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, "train.steps=60", "train.eval_every=1", "optim.lr=1", "launch.ranks=2"]
    first = run_recipe("finetune", tmp_path, *arguments, "train.patience=3")
    assert first.status == 0, first.err
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    lowest = min(rows[1:], key=lambda row: row["loss"])
    result = first.result
    assert result["stopped_early"]
    assert result["status"] == "completed"
    assert result["steps"] == rows[-1]["step"] == lowest["step"] + 3 < 60
    assert (result["best_loss"], result["best_step"]) == (lowest["loss"], lowest["step"])
    assert "stopping early, as 3 evaluations in a row were not lower" in first.err

    store = tmp_path / "checkpoints"
    best = f"step-{lowest['step']:08d}"
    assert (store / "best").read_text().strip() == best
    assert {path.name for path in store.glob("step-*")} == {best, first.checkpoint.name}, "and no earlier best one"

    again = run_recipe("finetune", tmp_path, *arguments, "train.patience=3")
    assert again.status == 0, again.err
    assert again.result == result, "a run that has stopped early is finished"
    longer = run_recipe("finetune", tmp_path, *arguments, "train.patience=4", f"train.steps={result['steps'] + 1}")
    assert longer.status == 0, longer.err
    assert f"{result['steps'] + 1}" in str(longer.checkpoint)
    assert len(longer.metrics) == result["steps"] + 1, "it goes on counting where it was"


@pytest.mark.long
def test_a_model_that_got_worse_is_not_called_the_best(settings: list[str], tmp_path: Path) -> None:
    """Nor by the run that resumes it; patience and the best step are among trained steps."""
    arguments = [*settings, "optim.lr=1", "train.eval_every=1"]
    for num_steps in (1, 2):
        ended = run_recipe("finetune", tmp_path, *arguments, f"train.steps={num_steps}")
        assert ended.status == 0, ended.err
        rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
        lowest, before = min(rows[1:], key=lambda row: row["loss"]), rows[0]["loss"]
        assert lowest["loss"] > before, "so large is the learning rate"
        assert "the lowest so far" not in ended.err
        than_before = f"not lower than before training ({before:.4f})"
        best = f"best held-out loss {lowest['loss']:.4f} after step {lowest['step']}, {than_before}"
        assert best in ended.err.splitlines()[-1]
        assert ended.err.count(than_before) == 2, "at the evaluation, too"
        found = [ended.result[name] for name in ("loss_before", "best_loss", "best_step")]
        assert found == [before, lowest["loss"], lowest["step"]]


def signal_in_step(step: int, patch: pytest.MonkeyPatch) -> None:
    """Have a SIGTERM come in this step of each run of the finetune recipe in this process."""
    steps = fs.train

    def signaled(run: TrainingRun) -> Iterator[StepReport]:
        for report in steps(run):
            run.stop.number = signal.SIGTERM if report.step == step - 1 else run.stop.number
            yield report

    patch.setattr(fs, "train", signaled)


@pytest.mark.long
def test_a_signal_in_the_last_step_costs_no_evaluation(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_step(4, monkeypatch)
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_every=2"]
    ended = run_recipe(
        "finetune", tmp_path / "run", *settings, "train.steps=4", "train.eval_every=1", "optim.lr=1e-2", *keep
    )
    assert (ended.status, ended.result["best_step"]) == (0, 4), ended.err
    assert ended.result["perplexity"] < ended.result["perplexity_before"]
    steps_kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps_kept == ["step-00000002", "step-00000004"], "that is a multiple of two, if saved as the best"
    step = f"resume={tmp_path}/run/checkpoints/step-00000002"
    other = run_recipe("finetune", tmp_path / "other", *settings, "train.steps=3", "optim.lr=1e-2", step)
    assert other.status == 0, other.err
    assert other.result["tokens"] == 3 * ended.result["tokens"] // 4
    assert "perplexity_before" not in other.result, "it was not measured before training"


@pytest.mark.long
def test_ranks_whose_launcher_was_killed_save_and_end(settings: list[str], tmp_path: Path) -> None:
    """As the kernel's OOM killer may choose the process that started them, they would train on unseen.

    torch has the kernel send them SIGINT, which is ignored by jobs in the background of a script.
    """
    given = [*settings, "train.steps=100000", "optim.lr=1e-3", "launch.ranks=2", "train.log_every=1000"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    started = Started("finetune", tmp_path, *given)
    signal.signal(signal.SIGINT, before)
    launcher, metrics, deadline = psutil.Process(started.pid), tmp_path / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = launcher.children()
    launcher.kill()
    assert started.wait().status == -signal.SIGKILL
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert (len(ranks), alive) == (2, [])
    steps = StepStore(tmp_path / "checkpoints")
    assert steps.latest() == metrics.read_text().count("\n") > 0
    given[given.index("train.steps=100000")] = f"train.steps={(steps.latest() or 0) + 1}"
    again = run_recipe("finetune", tmp_path, *given)
    assert again.status == 0, again.err


@pytest.mark.long
def test_an_evaluation_that_a_signal_came_before_is_made_by_the_next_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ["train.eval_every=1", "train.patience=2", "checkpoint.save_best=true"]
    arguments = [*settings, *watch, "train.steps=9", "optim.lr=1e-1", "seed=1"]
    whole = run_recipe("finetune", tmp_path / "whole", *arguments)
    assert (whole.result["best_step"], whole.result["steps"]) == (2, 4), "so much depends on the evaluation of step 2"
    with monkeypatch.context() as patch:
        signal_in_step(2, patch)
        stopped = run_recipe("finetune", tmp_path / "again", *arguments)
    assert stopped.status == 128 + signal.SIGTERM, stopped.err
    assert "held out after step 2" not in stopped.err, "whoever stops a run does not wait for it"
    for _ in range(2):
        ended = run_recipe("finetune", tmp_path / "again", *arguments)
        assert ended.status == 0, ended.err
    kept = ("steps", "best_loss", "best_step", "perplexity", "final_loss")
    assert [ended.result[name] for name in kept] == [whole.result[name] for name in kept]
    for name in ("evaluations.jsonl", "checkpoints/best", "metrics.jsonl"):
        found, expected = ((tmp_path / run / name).read_text() for run in ("again", "whole"))
        assert found.count("\n") == expected.count("\n")
    assert (tmp_path / "again/checkpoints/best").read_text() == (tmp_path / "whole/checkpoints/best").read_text()


@pytest.mark.long
def test_a_last_step_is_kept_when_a_later_run_does_better(settings: list[str], tmp_path: Path) -> None:
    for steps in (1, 2, 4):
        ended = run_recipe(
            "finetune", tmp_path, *settings, "optim.lr=1e-3", f"train.steps={steps}", "train.eval_every=1"
        )
        assert ended.status == 0, ended.err
    assert ended.result["best_step"] == 4
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-0000000{step}" for step in (1, 2, 4)
    ]


def test_a_loss_that_is_not_finite(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, "train.steps=9", "optim.lr=1e30", "checkpoint.every=1"]
    ended = run_recipe("finetune", tmp_path / "stop", *arguments)
    assert ended.status == 1
    assert "Step 2 has loss" in ended.err
    assert f"The last good checkpoint is {tmp_path}/stop/checkpoints/step-00000001;" in ended.err

    ended = run_recipe("finetune", tmp_path / "skip", *arguments, "train.non_finite=skip", "train.max_skips=2")
    assert ended.status == 1
    assert "step 3 changed no weights" in ended.err
    assert "after 2 skipped steps in a row" in ended.err
    assert [(row["grad_norm"] is None, row["skipped"]) for row in ended.metrics] == [(False, 0), (True, 1), (True, 2)]
    assert not (ended.run_dir / "result.json").exists()


@pytest.mark.long
def test_a_run_goes_on_from_a_step_before_which_all_were_skipped(
    settings: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Its optimizer has no state yet, and so the step has none."""
    shutil.copytree(tiny_model, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, tmp_path / "broken" / "model.safetensors")
    without = ["data.eval_path=null", "train.eval_windows=null", f"model.path={tmp_path}/broken"]
    skips = ["train.non_finite=skip", "train.max_skips=9", "checkpoint.every=1", "launch.ranks=2"]
    for steps in (2, 4):
        ended = run_recipe("finetune", tmp_path / "run", *settings, *without, *skips, f"train.steps={steps}")
        assert ended.status == 0, ended.err
        assert ended.result["skipped_steps"] == steps
    assert len(ended.metrics) == 4
    assert "step 2 changed no weights" not in ended.err, "it went on from there"


@pytest.mark.long
def test_what_else_is_written(settings: list[str], tmp_path: Path) -> None:
    """Figures in TensorBoard as in metrics.jsonl, a trace of each rank, and the same bits in a second run."""
    watch = ["train.trackers=[tensorboard]", "train.profile=[2]", "train.deterministic=true"]
    arguments = [*settings, "train.steps=3", "train.eval_every=2", "launch.ranks=2", *watch]
    ended, again = (run_recipe("finetune", tmp_path / name, *arguments) for name in ("one", "two"))
    assert ended.status == again.status == 0, ended.err
    assert ended.losses == again.losses
    with open_checkpoint(ended.checkpoint) as one, open_checkpoint(again.checkpoint) as two:
        assert tensor_digests(one) == tensor_digests(two)

    found = scalars(tmp_path / "one" / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3], "once, by rank 0"
    assert [value for _, value in found["train/loss"]] == pytest.approx(ended.losses, rel=1e-6)
    assert [value for _, value in found["train/total_tokens"]] == [128, 256, 384]
    assert [value for _, value in found["train/epoch"]] == pytest.approx([row["epoch"] for row in ended.metrics])
    assert [step for step, _ in found["held_out/perplexity"]] == [0, 2, 3]
    (hparams,) = (tmp_path / "one" / "tensorboard").glob("*/hparams.yml")
    assert "train.steps: 3" in hparams.read_text()
    assert "data.sequence_length: 32" in hparams.read_text()
    assert sorted(path.name for path in (tmp_path / "one" / "profile").glob("*.json.gz")) == [
        f"step-00000002-rank-{rank}.json.gz" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.patience=2"], "train.patience=2 needs evaluations during training, but with train.eval_every=0"),
        (["train.min_delta=0.1"], "train.min_delta=0.1 has no effect"),
        (["train.max_skips=3"], "train.max_skips=3 has no effect"),
        (["train.profile=[0]"], "train.profile=[0] names step 0"),
        (["train.trackers=[tensorbord]"], "did you mean tensorboard?"),
        (["train.patience=2", "train.eval_every=5", "data.eval_path=null"], "needs held-out text"),
        (["train.eval_every=5", "data.eval_path=null"], "train.eval_every=5 needs held-out text"),
        (["train.eval_windows=5", "data.eval_path=null"], "train.eval_windows=5 needs held-out text"),
    ],
)
def test_settings_that_would_do_nothing(settings: list[str], tmp_path: Path, overrides: list[str], words: str) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, *overrides)
    assert ended.status == 2
    assert words in ended.err


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def evaluated_steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in evaluations(run_dir)]


@pytest.mark.long
def test_a_resume_with_nothing_left_to_train_evaluates_its_step(settings: list[str], tmp_path: Path) -> None:
    first = run_recipe("finetune", tmp_path, *settings, "train.steps=4", "train.eval_every=3", "checkpoint.every=2")
    assert first.status == 0, first.err
    for step in (tmp_path / "checkpoints").glob("step-*"):  # one of them was deleted as another one was better
        if step.name > "step-00000002":
            shutil.rmtree(step)
    (tmp_path / "result.json").unlink()
    again = run_recipe("finetune", tmp_path, *settings, "train.steps=2", "train.eval_every=3")
    assert again.status == 0, again.err
    assert evaluated_steps(tmp_path) == [0, 2]
    assert again.result["perplexity"] != again.result["perplexity_before"]
    assert (again.result["steps"], again.result["best_step"]) == (2, 2)
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == "step-00000002"


@pytest.mark.long
def test_a_resume_elsewhere_begins_files_of_its_own(settings: list[str], tmp_path: Path) -> None:
    """Rows of a run that died there before its first save are of other steps."""
    arguments = [*settings, "train.eval_every=2", "train.steps=2"]
    for name in ("one", "other"):
        assert run_recipe("finetune", tmp_path / name, *arguments).status == 0
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    (tmp_path / "other" / "result.json").unlink()
    ended = run_recipe(
        "finetune", tmp_path / "other", *arguments, "train.steps=4", "train.global_batch_size=4",
        f"resume={tmp_path}/one",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    assert [row["step"] for row in ended.metrics] == [3, 4]
    assert evaluated_steps(tmp_path / "other") == [4]
    assert "perplexity_before" not in ended.result


@pytest.mark.long
def test_the_best_of_the_saved_steps_where_the_best_is_not_saved(settings: list[str], tmp_path: Path) -> None:
    """Also of a run that was resumed, and of one that goes on elsewhere, where the best steps so far are not."""
    arguments = [*settings, "train.eval_every=1", "checkpoint.save_best=false", "checkpoint.every=2", "optim.lr=0.3"]
    for steps in (4, 8):
        ended = run_recipe("finetune", tmp_path / "run", *arguments, f"train.steps={steps}", "seed=3")
        assert ended.status == 0, ended.err
        losses = {row["step"]: row["loss"] for row in evaluations(tmp_path / "run")}
        lowest = min(range(2, steps + 1, 2), key=losses.__getitem__)
        assert (tmp_path / "run" / "checkpoints" / "best").read_text().strip() == f"step-{lowest:08d}"
    worse = run_recipe(
        "finetune", tmp_path / "other", *arguments, "optim.lr=30", "train.steps=10", "seed=3", f"resume={tmp_path}/run"
    )
    assert worse.status == 0, worse.err
    assert evaluations(tmp_path / "other")[-1]["loss"] > max(losses.values())
    assert (tmp_path / "other" / "checkpoints" / "best").read_text().strip() == "step-00000010"
    assert worse.result["perplexity"] is None, "beyond all numbers"


@pytest.mark.long
def test_retention_holds_from_the_start_of_a_resume(settings: list[str], tmp_path: Path) -> None:
    """After a full disk, fewer steps to keep make room for the first save."""
    arguments = [*settings, "checkpoint.every=1", "checkpoint.save_best=false", "train.eval_windows=4"]
    assert run_recipe("finetune", tmp_path, *arguments, "train.steps=3").status == 0
    (tmp_path / "result.json").unlink()
    ended = run_recipe("finetune", tmp_path, *arguments, "train.steps=3", "checkpoint.keep_last=1")
    assert ended.status == 0, ended.err
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_damaged_step_says_what_to_do(settings: list[str], tmp_path: Path) -> None:
    assert run_recipe("finetune", tmp_path, *settings, "train.steps=2", "checkpoint.every=1").status == 0
    step = tmp_path / "checkpoints" / "step-00000002"
    shard = next(step.glob("shard-*.safetensors"))
    content = shard.read_bytes()
    advice = f"Delete {step} to resume from an earlier step, or to start at the beginning."
    for damage in (lambda: shard.write_bytes(content[:-10]), lambda: (step / "manifest.json").write_text("{")):
        damage()
        refused = run_recipe("finetune", tmp_path, *settings, "train.steps=4", "checkpoint.every=1")
        assert (refused.status, advice in refused.err) == (2, True), refused.err
