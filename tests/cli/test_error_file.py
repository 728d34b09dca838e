"""`error.txt`: what a run that failed leaves, which the next start removes and `report` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run_arguments, run_recipe


@pytest.fixture
def settings(tiny_model: Path, texts: Path) -> list[str]:
    return [f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "data.sequence_length=16", "train.steps=3"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_run_leaves_its_error_until_it_starts_again(ranks: int, settings: list[str], tmp_path: Path) -> None:
    settings = [*settings, f"launch.ranks={ranks}", "train.max_grad_norm=null"]
    failed = run_recipe("finetune", tmp_path / "run", *settings, "optim.lr=1e20")
    assert failed.status == 1
    message, _, trace = (tmp_path / "run" / "error.txt").read_text().partition("\n\n")
    assert failed.err.strip().endswith(f"error: {message}")
    assert trace.startswith("Traceback")
    assert "LossError" in trace
    shown = run_arguments(["report", str(tmp_path)]).out
    assert f"\nFailed\n  run: {message}" in shown
    assert "run  failed" in shown

    refused = run_recipe("finetune", tmp_path / "run", *settings, "optim.lr=1e-3", "train.non_finite=never")
    assert refused.status == 2
    assert (tmp_path / "run" / "error.txt").exists()
    assert run_recipe("finetune", tmp_path / "run", *settings, "optim.lr=1e-3").status == 0
    assert not (tmp_path / "run" / "error.txt").exists()
    assert "failed" not in run_arguments(["report", str(tmp_path)]).out.lower()


@pytest.mark.long
def test_a_plan_and_a_dry_run_leave_the_error_of_a_run_as_it_is(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_recipe("finetune", run, *settings, "train.max_grad_norm=null", "optim.lr=1e20").status == 1
    error = (run / "error.txt").read_text()
    assert run_recipe("plan", run, settings[0]).status == 0
    assert (run / "error.txt").read_text() == error
    assert run_recipe("doctor", run, *settings[:1], "data.path=gone.txt").status != 0
    assert (run / "error.txt").read_text() == error


def test_what_is_refused_leaves_none(settings: list[str], tmp_path: Path) -> None:
    assert run_recipe("finetune", tmp_path / "run", *settings, "data.text_column=none").status == 2
    assert not (tmp_path / "run").exists()
    (tmp_path / "there").mkdir()
    assert run_recipe("evaluate", tmp_path / "there", f"checkpoint={tmp_path / 'gone'}", *settings[1:3]).status == 2
    assert list((tmp_path / "there").iterdir()) == []
