"""Ranks that divide an evaluation: the figures of one process, to the last bit of each batch's losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.evaluation.harness_tasks import CAPITALS, CHOICE, PROSE, WORDS, needs_harness
from tests.support.runs import Ended, run_recipe

BY_DOCUMENTS = ("perplexity.by=documents", "data.sample_by=line", "perplexity.num_resamples=200")


def settings(tiny_model: Path, texts: Path, tmp_path: Path) -> list[str]:
    return [
        f"checkpoint={tiny_model}", f"data.path={texts}/held_out.txt", "data.sequence_length=64", "batch_size=4",
        f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip


def figures(ended: Ended) -> dict[str, Any]:
    assert ended.status == 0, ended.err
    found = {name: value for name, value in ended.result.items() if name not in ("seconds", "schedule")}
    found.get("against", {}).pop("seconds", None)
    return found


def losses(run_dir: Path, name: str = "losses.jsonl") -> list[tuple[list[int], list[float]]]:
    lines = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    return [(line["windows"], line["losses"]) for line in lines[1:]]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), BY_DOCUMENTS, ("dispatch.device_map=disk",)])
def test_ranks_have_the_figures_of_one_process(
    tiny_model: Path, texts: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    given = [*settings(tiny_model, texts, tmp_path), *more]
    alone = run_recipe("evaluate", tmp_path / "alone", *given)
    ranks = 2 if more else 3
    divided = run_recipe("evaluate", tmp_path / "divided", *given, "launch.device=cpu", f"launch.ranks={ranks}")
    assert figures(divided) == figures(alone)
    assert losses(tmp_path / "divided") == losses(tmp_path / "alone"), "every bit of them"
    assert divided.out.count("\nperplexity ") == 1, "said by one rank"
    assert divided.out.count("tokens in") == 1


@pytest.mark.long
def test_what_two_ranks_have_begun_goes_on_alone_and_the_other_way(
    tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    given, run_dir = settings(tiny_model, texts, tmp_path), tmp_path / "run"
    against = f"against={tiny_model}"
    whole = run_recipe("evaluate", run_dir, *given, against, "launch.ranks=2")
    first, expected = figures(whole), losses(run_dir)
    assert losses(run_dir, "losses_against.jsonl") == expected
    for count, ranks in ((4, 1), (3, 2)):
        kept = (run_dir / "losses.jsonl").read_bytes().splitlines(keepends=True)[:count]
        (run_dir / "losses.jsonl").write_bytes(b"".join(kept))
        again = run_recipe("evaluate", run_dir, *given, against, f"launch.ranks={ranks}")
        assert f"continuing after {count - 1} of" in again.out
        assert figures(again) == first
        assert losses(run_dir) == expected


@pytest.mark.long
def test_an_error_of_one_rank_is_that_of_the_run(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file(tensors | {name: tensors[name] * float("nan")}, broken / "model.safetensors", {"format": "pt"})
    given = [f"checkpoint={broken}", *settings(tiny_model, texts, tmp_path)[1:]]
    ended = run_recipe("evaluate", tmp_path / "run", *given, "launch.ranks=2")
    assert ended.status == 1
    assert ended.err.count("error: ") == 1
    assert "nan" in ended.err
    assert not (tmp_path / "run" / "result.json").exists()


def test_speed_is_of_one_process(tiny_model: Path, tmp_path: Path) -> None:
    given = (f"checkpoint={tiny_model}", "task=speed", "launch.ranks=2", "launch.device=cpu")
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    assert ended.status == 2
    assert "task=speed measures one process, and this run has 2 ranks" in ended.err


@needs_harness
@pytest.mark.filterwarnings("default")
def test_ranks_divide_the_questions_of_the_harness(tiny_model: Path, tmp_path: Path) -> None:
    names = [capital for _, capital in CAPITALS]
    rows = [{"country": country, "choices": names, "label": label} for label, (country, _) in enumerate(CAPITALS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"capitals": CHOICE, "words": WORDS}.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(rows=tmp_path / "rows.jsonl"))
    given = (
        "task=lm_eval", f"lm_eval.include_path={tmp_path}", f"checkpoint={tiny_model}", "lm_eval.save_samples=true",
        "lm_eval.tasks=[capitals,words]", "launch.device=cpu",
    )  # fmt: skip
    alone = run_recipe("evaluate", tmp_path / "alone", *given[:-1])
    divided = run_recipe("evaluate", tmp_path / "divided", *given, "launch.ranks=2")
    assert divided.status == 0, divided.err
    assert divided.result["results"] == alone.result["results"]
    for name in ("capitals", "words"):
        written = [(tmp_path / run / "samples" / f"{name}.jsonl").read_text() for run in ("alone", "divided")]
        both = [[json.loads(line) for line in text.splitlines()] for text in written]
        assert [row["doc_id"] for row in both[1]] == list(range(5))
        for one, other in zip(*both, strict=True):  # in batches of other questions
            if name == "words":
                assert one["filtered_resps"] == other["filtered_resps"]
            else:
                scores = [[float(reply[0]) for reply in row["filtered_resps"]] for row in (one, other)]
                assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    shots = run_recipe("evaluate", tmp_path / "shots", *given, "launch.ranks=2", "lm_eval.num_fewshot=1")
    assert shots.status == 0, shots.err
    assert "examples before questions are drawn on each rank" in shots.out
    assert shots.result["provenance"]["settings"]["num_ranks"] == 2
    assert "num_ranks" not in divided.result["provenance"]["settings"]
    few = run_recipe("evaluate", tmp_path / "few", *given, "launch.ranks=2", "lm_eval.limit=1")
    assert few.status == 2
    assert "asks 1 question, which 2 ranks cannot divide" in few.err


@needs_harness
@pytest.mark.filterwarnings("default")
def test_a_rolling_task_on_ranks_has_no_cache(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"country": name}) + "\n" for name, _ in CAPITALS))
    (tmp_path / "countries.yaml").write_text(PROSE.format(rows=tmp_path / "rows.jsonl"))
    given = ("task=lm_eval", f"lm_eval.include_path={tmp_path}", f"checkpoint={tiny_model}", "lm_eval.tasks=countries")
    refused = run_recipe("evaluate", tmp_path / "run", *given, "launch.ranks=2", "lm_eval.cache=true")
    assert refused.status == 2
    assert "lm_eval.cache=true cannot be used with 2 ranks for countries" in refused.err


def test_a_device_of_ranks_is_not_that_of_one_process(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    ended = run_recipe("evaluate", tmp_path / "run", *settings(tiny_model, texts, tmp_path), "launch.device=cpu")
    assert ended.status == 2
    assert "launch.device=cpu is for several ranks; for one process set dispatch.device_map" in ended.err


@needs_harness
@pytest.mark.filterwarnings("default")
def test_the_shipped_task_and_the_cache_of_the_harness(tiny_model: Path, tmp_path: Path) -> None:
    given = (
        "task=lm_eval", f"checkpoint={tiny_model}", "lm_eval.tasks=everyday", "lm_eval.limit=20", "lm_eval.cache=true"
    )  # fmt: skip
    first = run_recipe("evaluate", tmp_path / "run", *given)
    assert first.status == 0, first.err
    assert "20 questions of 1 task" in first.out
    assert "warning: lm_eval.cache=true" in first.err
    results = first.result["results"]
    again = run_recipe("evaluate", tmp_path / "run", *given)
    assert "Cached requests: 80" in again.err or "Running loglikelihood requests" not in again.err
    assert again.result["results"] == results
