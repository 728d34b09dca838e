"""`plan RUN`: the plan of a run's settings beside what it measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fsdp_shard.errors import CheckpointError
from fsdp_shard.planning.measured.comparison_with_run import (
    ComparedFigure,
    compare_with_run,
    comparison_figures,
    comparison_text,
)
from fsdp_shard.planning.measured.measured_run import read_measured
from tests.support.plans import plan
from tests.support.runs import Ended, run_arguments, run_recipe
from tests.support.tiny import save_model


def _digests(directory: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(directory)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def _train(model: Path, run_dir: Path, *settings: str) -> Ended:
    text = run_dir.parent / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    given = ("data.sequence_length=32", "train.steps=2", "launch.ranks=2", "train.global_batch_size=4")
    return run_recipe("finetune", run_dir, f"model.path={model}", f"data.path={text}", *given, *settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("shard=fsdp1", "checkpoint.layout=gathered"),
        ("optim=adafactor",),
        ("adapter=lora",),
    ],
    ids=["fsdp2", "fsdp1", "adafactor", "lora"],
)
def test_a_run_is_planned_and_compared(model: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    ended = _train(model, run, *settings)
    assert ended.status == 0, ended.err
    before = _digests(run)
    compared = run_recipe("plan", tmp_path / "plan", f"run={run}")
    assert compared.status == 0, compared.err
    assert _digests(run) == before  # nothing is written, not even the same
    measured = compared.result["measured"]
    rows = {(row["term"], row["rank"]): row for row in measured["compared"]}
    assert rows.keys() == {("parameters", None), *((term, rank) for term in ("optimizer", "peak") for rank in (0, 1))}
    for (term, _), row in rows.items():
        if term == "peak":  # a process has more than the tensors of a plan
            assert 0 < row["planned"] < row["measured"]
        else:
            assert row["difference"] == pytest.approx(0.0, abs=0.03), row
    assert compared.result["per_rank"][1]["optimizer_bytes"] == rows["optimizer", 1]["planned"]
    assert "Off by most: peak of rank" in compared.out
    assert "Parameters and optimizer agree, so the difference is in short-lived tensors" in compared.out
    assert "resident memory of a process" in compared.out
    assert measured["device"] == "cpu"


@pytest.mark.long
@pytest.mark.parametrize("settings", [("shard=ddp",), ("shard.replicas=2",)], ids=["ddp", "hsdp"])
def test_replicas_are_compared_with_the_files_of_all_ranks(
    model: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    assert _train(model, tmp_path / "run", *settings).status == 0
    compared = run_recipe("plan", tmp_path / "plan", f"run={tmp_path / 'run'}")
    assert compared.status == 0, compared.err
    rows = [row for row in compared.result["measured"]["compared"] if row["term"] == "optimizer"]
    assert [row["rank"] for row in rows] == [None]
    assert rows[0]["difference"] == pytest.approx(0.0, abs=0.03)
    assert "Parameters and optimizer agree" in compared.out


@pytest.mark.long
def test_what_was_not_saved_is_not_planned_as_saved(model: Path, tmp_path: Path) -> None:
    assert _train(model, tmp_path / "run", "checkpoint.optimizer=false").status == 0
    compared = run_recipe("plan", tmp_path / "plan", f"run={tmp_path / 'run'}")
    assert {row["term"] for row in compared.result["measured"]["compared"]} == {"parameters", "peak"}
    assert compared.result["step"]["checkpoint"]["optimizer_bytes"] == 0
    assert "Parameters agree, so the difference" in compared.out


@pytest.mark.long
def test_a_run_that_resumed_is_planned_as_one(model: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", ("shard=ddp", "data.sequence_length=8", "train.global_batch_size=2")
    for steps, phase, resumed_step in ((1, "backward", None), (2, "resume", 1)):
        trained = _train(model, run, *settings, f"train.steps={steps}")
        assert trained.status == 0, trained.err
        assert trained.result["resumed_step"] == resumed_step
        ended = run_recipe("plan", tmp_path / f"plan{steps}", f"run={run}")
        assert ended.result["per_rank"][0]["peak"]["phase"] == phase


@pytest.mark.long
def test_a_run_that_was_killed_has_the_ranks_of_its_latest_checkpoint(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert _train(model, run, "train.global_batch_size=2").status == 0
    (run / "result.json").unlink()
    # As two machines of one to two would have started it, which is no run of four ranks.
    others = {"ranks: 2": "ranks: 1", "nodes: '1'": "nodes: '1:2'", "rendezvous: null": "rendezvous: a:1"}
    settings = (run / "config.yaml").read_text()
    for old, new in others.items():
        assert old in settings
        settings = settings.replace(old, new)
    (run / "config.yaml").write_text(settings)
    ended = run_arguments(["plan", str(run), f"run_dir={tmp_path / 'plan'}", "device=h100"])
    assert ended.status == 0, ended.err
    result = json.loads((tmp_path / "plan" / "result.json").read_text())
    assert len(result["per_rank"]) == 2
    assert result["refused"] is None
    assert [row["rank"] for row in result["measured"]["compared"]] == [0, 1]
    assert "(the median)." in ended.out, "no bound of a device that may be another one"


@pytest.mark.long
def test_a_path_alone_names_the_run_and_leaves_no_file(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert _train(model, run, "model.kernels=none", "train.neftune_alpha=5").status == 0
    before = _digests(tmp_path)
    by_path = run_arguments(["plan", str(run)])
    assert by_path.status == 0, by_path.err
    assert run_arguments(["plan", f"run={run}"]).out == by_path.out
    assert _digests(tmp_path) == before
    assert "The plan does not know of: train.neftune_alpha=5.0 (the noise)." in by_path.out
    assert "Not planned" not in by_path.out, "it is said once"
    result = json.loads((run / "result.json").read_text())
    assert len(result["memory_before_bytes_by_rank"]) == 2
    peaks = zip(result["memory_before_bytes_by_rank"], result["peak_memory_bytes_by_rank"], strict=True)
    assert all(0 < start < peak for start, peak in peaks)
    _check_wrong_uses(run, tmp_path)
    _check_older_runs(run)


def _check_wrong_uses(run: Path, tmp_path: Path) -> None:
    other = run_arguments(["plan", str(run), "train.micro_batch_size=2"])
    assert other.status == 2
    assert "train.micro_batch_size would plan another run" in other.err
    inside = run_arguments(["plan", str(run), f"run_dir={run}"])
    assert inside.status == 2
    assert "nothing is written into it" in inside.err
    (tmp_path / "empty").mkdir()
    for path, said in (("missing", "is not a directory"), (str(tmp_path / "empty"), "no such file of settings")):
        ended = run_arguments(["plan", path])
        assert ended.status == 2
        assert said in ended.err
    assert "fits" not in run_arguments(["plan", str(run), "device.memory=1GB"]).err


def _check_older_runs(run: Path) -> None:
    """Runs of before did not record the memory at their start; others have not ended."""
    file = run / "result.json"
    result = json.loads(file.read_text())
    del result["memory_before_bytes_by_rank"], result["device"]
    file.write_text(json.dumps(result))
    text = run_arguments(["plan", str(run)])
    assert "The run did not record its memory before the weights were loaded" in text.out
    assert "They agree within" in text.out  # parameters and optimizer
    file.unlink()
    text = run_arguments(["plan", str(run)])
    assert text.status == 0, text.err
    assert "The run has not ended" in text.out
    (run / "metrics.jsonl").unlink()
    text = run_arguments(["plan", str(run)])
    assert text.status == 2
    assert "so it has measured nothing" in text.err


def test_metrics_of_another_run_are_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"step": 1, "step_seconds": 9.0}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a link to .*elsewhere"):
        read_measured(tmp_path)


def test_peaks_of_gpus_are_compared_as_they_are(tmp_path: Path) -> None:
    found = plan(num_ranks=2)
    peak = found.peak_bytes or 0
    (tmp_path / "config.yaml").write_text("defaults: []")
    figures = {"device": "cuda", "peak_memory_bytes_by_rank": [peak - peak // 50, peak]}
    (tmp_path / "result.json").write_text(json.dumps(figures))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 9.0}\n{"step": 2, "step_seconds": 3.0}\n{"st')
    run = read_measured(tmp_path)
    rows = compare_with_run(found, run)
    assert [(row.term, row.rank) for row in rows] == [("peak", 0), ("peak", 1)]
    assert rows[0].difference == pytest.approx(0.02, abs=0.005)
    text = comparison_text(rows, found, run, {"step": {"time": {"seconds": 1.5}}})
    assert "They agree within 2.0%." in text
    assert "A step took 3 s (the median), 2.0 x the bound of 1.5 s." in text
    assert "torch's allocator" in text


def test_a_figure_that_was_not_measured_has_no_difference(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: []")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    row = ComparedFigure("peak", 0, 100, 0)
    figures = comparison_figures([row], read_measured(tmp_path))
    assert figures["compared"][0]["difference"] is None
    assert row.describe() == "peak of rank 0, planned 100 B, measured 0 B (n/a)"


def test_the_term_that_is_off_by_most_is_named() -> None:
    assert ComparedFigure("optimizer", 1, 150, 100).describe() == (
        "optimizer of rank 1, planned 150 B, measured 100 B (+50.0%)"
    )


def test_a_plan_says_which_of_its_settings_it_does_not_plan(model: Path, tmp_path: Path) -> None:
    typed = [f"model.path={model}", "data.sequence_length=16", "train.neftune_alpha=5", "shard.compile=true"]
    ended = run_recipe("plan", tmp_path / "run", *typed)
    assert "Not planned: shard.compile=true (a compiler decides what is kept); train.neftune_alpha=5.0 (the noise)" in (
        ended.out
    )
