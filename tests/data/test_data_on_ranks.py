"""Sample orders of more than one plain file, through the recipe: on any ranks, and resumed, the same training."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import open_checkpoint
from tests.support.digests import tensor_digests
from tests.support.runs import Ended, Started, run_recipe

SETTINGS = [
    "train.global_batch_size=4",
    "train.steps=8",
    "optim.lr=3e-3",
    "train.schedule=constant",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "seed=5",
]


def digests(ended: Ended) -> dict[str, str]:
    with open_checkpoint(ended.checkpoint) as index:
        return tensor_digests(index)


def sources(ended: Ended) -> list[dict[str, dict[str, float]]]:
    """What each step tells of the sources of a mixture."""
    return [row["sources"] for row in ended.metrics]


def train(run_dir: Path, *overrides: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *SETTINGS, *overrides)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.slow
def test_a_mixture_on_any_ranks_and_resumed(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i}.", "output": "x" * i} for i in range(1, 12)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = f"asked:{{path:{tmp_path}/asked.jsonl,kind:instruction,weight:0.5}}"
    mixture = f"data.mixture={{prose:{{path:{texts}/train.txt,weight:1.5}},{asked}}}"
    given = [f"model.path={tiny_model}", f"data.cache_dir={tmp_path / 'cache'}", mixture, "data.eval_fraction=0.1"]
    given.append("data.sequence_length=128")
    whole = train(tmp_path / "whole", *given)
    assert whole.result["sources"] == {
        "asked": {"share": 0.25, "samples": 8, "epochs": 0.8, "tokens": whole.result["tokens"] - 24 * 128},
        "prose": {"share": 0.75, "samples": 24, "epochs": pytest.approx(24 / 423, abs=1e-2), "tokens": 24 * 128},
    }
    last = whole.metrics[-1]["sources"]
    assert {name: {"share": whole.result["sources"][name]["share"], **last[name]} for name in last} == (
        whole.result["sources"]
    )
    assert f"prose: 24 samples, {24 * 128:,} tokens" in whole.err
    assert "train, prose (3 of 4 samples): 1 document, " in whole.err
    assert "train, asked (1 of 4 samples): 11 rows" in whole.err
    assert len(train(tmp_path / "parts", *given, "train.steps=3").losses) == 3
    second = train(tmp_path / "parts", *given)
    assert second.losses == whole.losses
    assert second.result["sources"] == whole.result["sources"]
    assert sources(second) == sources(whole)
    assert digests(second) == digests(whole)
    for ranks in (2, 4):
        many = train(tmp_path / f"ranks-{ranks}", *given, f"launch.ranks={ranks}")
        assert many.losses == pytest.approx(whole.losses, rel=1e-5)
        assert [row["tokens"] for row in many.metrics] == [row["tokens"] for row in whole.metrics]
        assert sources(many) == sources(whole)
    refused = run_recipe(
        "finetune", tmp_path / "parts", *SETTINGS, *given, "train.steps=9", mixture.replace("1.5", "2")
    )
    assert refused.status == 2
    assert "differ from those of the run to resume" in refused.err


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "packed mixture"])
def test_a_stream_on_any_ranks_and_resumed(tiny_model: Path, texts: Path, tmp_path: Path, kind: str) -> None:
    """Also two of them by weights: on 4 ranks, one of them is given all samples of `two`."""
    lines = [line for line in (texts / "train.txt").read_text().splitlines() if line.strip()][:90]
    (tmp_path / "lines").mkdir()
    for part in range(3):
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines[part::3])
        (tmp_path / "lines" / f"{part}.jsonl").write_text(rows)
    is_mixed = kind == "packed mixture"
    path = f"data.path={tmp_path / 'lines'}"
    if is_mixed:
        (tmp_path / "two.txt").write_text("\n".join(lines[:30]))
        two = f"two:{{path:{tmp_path}/two.txt,sample_by:line}}"
        path = f"data.mixture={{one:{{path:{tmp_path}/lines,weight:3}},{two}}}"
    given = [f"model.path={tiny_model}", path, "data.streaming=true"]
    given += ["data.shuffle_buffer=6", f"data.packing={is_mixed}", "data.sequence_length=96"]
    whole = train(tmp_path / "whole", *given)
    assert "is streamed, each 6 rows shuffled" in whole.err
    seen = whole.result.get("sources", {"": {"stream": whole.result.get("stream"), "samples": 32}})
    assert all(source["stream"]["rows"] for source in seen.values())
    assert [source["samples"] for source in seen.values()] == ([24, 8] if is_mixed else [32])
    for step in (3, 5):  # within a block, and past the first of them
        train(tmp_path / "parts", *given, f"train.steps={step}")
    parts = train(tmp_path / "parts", *given)
    assert parts.losses == whole.losses
    assert digests(parts) == digests(whole)
    place = json.loads((parts.checkpoint / "trainer.json").read_text())["place"]
    for one in place["sources"].values() if is_mixed else [place]:
        assert one["block"] + one["epoch"] > 0
    train(tmp_path / "moved", *given, "launch.ranks=4", "train.steps=5")
    moved = train(tmp_path / "moved", *given, "launch.ranks=2")
    assert moved.losses == pytest.approx(whole.losses, rel=1e-5)
    assert [row["tokens"] for row in moved.metrics] == [row["tokens"] for row in whole.metrics]
    assert moved.result.get("sources") == parts.result.get("sources") == whole.result.get("sources")
    if is_mixed:
        assert sources(moved) == sources(whole)
        refused = run_recipe(
            "finetune", tmp_path / "parts", *SETTINGS, *given, "train.steps=9", "data.shuffle_buffer=9"
        )
        assert refused.status == 2
        assert "differ from those of the run to resume" in refused.err


@pytest.mark.long
def test_what_is_left_out_of_a_stream_is_told(tiny_model: Path, tmp_path: Path) -> None:
    """Also of a run that is interrupted, and of all of it once that has gone on."""
    rows = [{"prompt": "a", "chosen": f"b{number}", "rejected": "c"} for number in range(4)]
    rows += [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 2 + [{"prompt": "a", "chosen": "b", "rejected": ""}]
    rows += [{"prompt": "a" * 40, "chosen": "b", "rejected": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model.path={tiny_model}", f"data.path={tmp_path}/rows.jsonl", "data.kind=preference", "objective=simpo"]
    given += ["data.streaming=true", "data.shuffle_buffer=8"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    started = Started("finetune", tmp_path / "run", *SETTINGS, *given, "train.steps=5000")
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGTERM)
    stopped = started.wait()
    assert stopped.status == 128 + signal.SIGTERM, stopped.err
    num_done = len(stopped.metrics)
    ended = train(tmp_path / "run", *given, f"train.steps={num_done + 1}")
    for run, epochs in ((stopped, num_done), (ended, num_done + 1)):
        reasons = f"pairs with equal answers: {2 * epochs:,}, pairs with an empty answer: {epochs:,}"
        line = f"stream: {8 * epochs:,} rows read, {4 * epochs:,} left out ({reasons}, pairs whose prompt fills the"
        assert f"{line} first 32 tokens: {epochs:,})" in run.err, run.err
    left_out = ended.result["stream"]["left_out"]
    assert sum(left_out.values()) == ended.result["stream"]["dropped"] == 4 * (num_done + 1)
