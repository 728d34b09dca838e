"""Several held-out sets by name: each has its own loss, that of one run over it alone, and all together one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data import DataConfig, check_data
from fsdp_shard.errors import ConfigError
from tests.support.runs import run_recipe


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "train.steps=4",
        "train.eval_every=2",
        "shard.param_dtype=float32",
        "data.sequence_length=32",
        "launch.device=cpu",
        "launch.ranks=2",
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path_factory.mktemp('tokens')}",
    ]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def test_held_out_data_that_are_trained_are_told(settings: list[str], tmp_path: Path) -> None:
    """Under another name, too: the tokens are compared."""
    for name in ("train", "copy", "other"):
        (tmp_path / f"{name}.txt").write_text(name.replace("copy", "train") * 200)
    sets = f"data.eval_sets={{new:{{path:{tmp_path}/other.txt}},old:{{path:{tmp_path}/copy.txt}}}}"
    given = [f"data.path={tmp_path}/train.txt", sets]
    ended = run_recipe("finetune", tmp_path / "run", *settings, "launch.ranks=1", "train.steps=1", *given)
    assert ended.status == 0, ended.err
    expected = (
        f"data.eval_sets.old has the tokens of the training data itself (data.path={tmp_path}/train.txt), so that"
    )
    assert f"warning: {expected}" in ended.err
    assert ended.err.count("tokens of the training data") == 1


@pytest.mark.long
def test_losses_of_other_held_out_data_are_not_compared(settings: list[str], texts: Path, tmp_path: Path) -> None:
    """The first ones are easy: nothing after them would be the best step."""
    held_out = tmp_path / "held_out.txt"
    given = [*settings, "launch.ranks=1", f"data.eval_path={held_out}", "train.eval_every=1"]
    given += ["optim.lr=1e-2", "train.schedule=constant"]
    held_out.write_text((texts / "train.txt").read_text()[:600])
    first = run_recipe("finetune", tmp_path / "run", *given, "train.steps=1")
    assert first.status == 0, first.err
    assert first.result["perplexity_before"] == _rows(tmp_path / "run")[0]["perplexity"]
    held_out.write_text("\x07\x08" * 300)
    resumed = run_recipe("finetune", tmp_path / "run", *given, "train.steps=2")
    assert resumed.status == 0, resumed.err
    assert "differ from those of the evaluations up to step 1: best step and patience start over" in resumed.err
    of_first, of_last = _rows(tmp_path / "run")[1:]
    assert of_first["held_out"] != of_last["held_out"]
    assert (resumed.result["best_step"], resumed.result["best_loss"]) == (2, of_last["loss"])
    assert "perplexity_before" not in resumed.result, "which was of other data"
    assert resumed.result["perplexity"] == of_last["perplexity"]


@pytest.mark.long
def test_each_set_has_the_loss_that_it_has_alone(settings: list[str], texts: Path, tmp_path: Path) -> None:
    lines = (texts / "held_out.txt").read_text().splitlines()
    pairs = [{"source": "a", "target": line[:20]} for line in lines[:9] if line.strip()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    given = {"plain": (f"{texts}/held_out.txt", "text"), "asked": (f"{tmp_path}/pairs.jsonl", "pairs")}
    sets = ",".join(f"{name}:{{path:{path},kind:{kind}}}" for name, (path, kind) in given.items())
    both = run_recipe("finetune", tmp_path / "both", *settings, f"data.eval_sets={{{sets}}}")
    assert both.status == 0, both.err
    rows = _rows(tmp_path / "both")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(list(row["sets"]) == ["asked", "plain"] for row in rows)
    for name in given:
        alone = run_recipe("finetune", tmp_path / name, *settings, f"data.eval_sets={{{name}:{sets_of(name, given)}}}")
        assert alone.status == 0, alone.err
        for row, own in zip(rows, _rows(tmp_path / name), strict=True):
            found = row["sets"][name]
            assert own["sets"][name]["loss"] == own["loss"]
            assert (found["loss"], found["perplexity"]) == (own["loss"], own["perplexity"])
            assert found["num_tokens"] == own["num_tokens"]
    for row in rows:
        parts = row["sets"].values()
        assert row["num_tokens"] == sum(part["num_tokens"] for part in parts)
        whole = sum(part["loss"] * part["num_tokens"] for part in parts) / row["num_tokens"]
        assert row["loss"] == pytest.approx(whole, rel=1e-12)
    last = rows[-1]
    assert f"loss {last['loss']:.4f}" in both.err
    assert f"asked {last['sets']['asked']['loss']:.4f}, plain {last['sets']['plain']['loss']:.4f}" in both.err
    assert both.result["best_loss"] == min(row["loss"] for row in rows[1:])
    assert len(both.result["peak_memory_bytes_by_rank"]) == 2


def sets_of(name: str, given: dict[str, tuple[str, str]]) -> str:
    path, kind = given[name]
    return f"{{path:{path},kind:{kind}}}"


@pytest.mark.long
def test_parts_held_out_of_a_mixture_have_theirs(settings: list[str], texts: Path, tmp_path: Path) -> None:
    mixed = f"data.mixture={{a:{{path:{texts}/train.txt}},b:{{path:{texts}/held_out.txt}}}}"
    own = [setting for setting in settings if not setting.startswith("data.path")]
    run = run_recipe("finetune", tmp_path / "run", *own, mixed, "data.eval_fraction=0.2", "train.eval_windows=8")
    assert run.status == 0, run.err
    assert list(_rows(tmp_path / "run")[0]["sets"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eval_sets": ["a.txt"]}, r"data\.eval_sets=\['a\.txt'\] is not a mapping"),
        ({"eval_sets": []}, r"data\.eval_sets=\[\] is not a mapping"),
        ({"eval_sets": {1: {"path": "a"}, "1": {"path": "b"}}}, r"the same one twice"),
        ({"eval_sets": {"": {"path": "a"}}}, r"has an empty name"),
        ({"eval_sets": {"a": "a.txt"}}, r"data\.eval_sets\.a=a\.txt is not a mapping"),
        ({"eval_sets": {"a": {"kind": "text"}}}, r"data\.eval_sets\.a\.path"),
        ({"eval_sets": {"a": {"path": "a", "weight": 2}}}, r"data\.eval_sets\.a\.weight is not a setting of a source"),
        ({"eval_sets": {"a": {"path": "a", "sample_by": "line", "kind": "chat"}}}, r"eval_sets\.a\.sample_by is for"),
        ({"eval_sets": {"a": {"path": "a"}}, "eval_path": "b"}, r"eval_path=b and data\.eval_sets=.* give one of them"),
        ({"eval_sets": {"a": {"path": "a"}}, "eval_fraction": 0.1}, r"both say what to hold out"),
    ],
)
def test_wrong_sets_are_errors(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        DataConfig(path="train.txt", **given).check("data.")


def test_names_may_be_numbers_and_a_split_needs_splits(tmp_path: Path) -> None:
    DataConfig(path="train.txt", eval_sets={2024: {"path": "b"}}).check("data.")  # as YAML reads it
    (tmp_path / "a.txt").write_text("text")
    config = DataConfig(path=f"{tmp_path}/a.txt", eval_sets={"a": {"path": f"{tmp_path}/a.txt"}}, eval_split="test")
    with pytest.raises(ConfigError, match=r"data\.eval_split=test is for datasets on the hub"):
        check_data(config)


def test_the_split_is_for_sets_too() -> None:
    DataConfig(path="train.txt", eval_sets={"a": {"path": "owner/name"}}, eval_split="test").check("data.")
