"""The losses of finished batches: an evaluation that is killed goes on, and ends with the same figures."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.distributed import Stopped
from fsdp_shard.errors import ConfigError, Interrupted
from fsdp_shard.evaluation.batch_log import BatchLog, BatchValues
from tests.support.runs import Ended, Started, run_recipe

BATCHES = [[2, 0], [1]]
FIRST, SECOND = BatchValues([2, 0], [0.1, 1 / 3], 0.5), BatchValues([1], [2.5], 0.25)


def test_finished_batches_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "losses.jsonl"
    with BatchLog(path, {"a": 1}, BATCHES) as log:
        assert log.finished == []
        log.append(FIRST)
    with BatchLog(path, {"a": 1}, BATCHES) as log:
        assert log.finished == [FIRST], "every bit of them"
        log.append(SECOND)
    with BatchLog(path, {"a": 1}, BATCHES) as log:
        assert log.finished == [FIRST, SECOND]


@pytest.mark.parametrize(
    "rest", [b"{", b'{"windows": [1], "losses": [2.5]', b"\x00\xff\n", b"[]\n", b"[" * 9999 + b"\n"]
)
def test_what_a_kill_leaves_of_a_line_is_dropped(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "losses.jsonl"
    with BatchLog(path, {}, BATCHES) as log:
        log.append(FIRST)
    with path.open("ab") as file:
        file.write(rest)
    with BatchLog(path, {}, BATCHES) as log:
        assert log.finished == [FIRST]
        log.append(SECOND)
    with BatchLog(path, {}, BATCHES) as log:
        assert log.finished == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("windows", "losses"), [([1], [2.0, 1.0]), ([1], ["x"]), ([0], [2.0]), ([1], [float("nan")]), ([1], 2.0)]
)
def test_a_line_of_something_else_is_computed_again(tmp_path: Path, windows: Any, losses: Any) -> None:
    path = tmp_path / "losses.jsonl"
    with BatchLog(path, {}, BATCHES) as log:
        log.append(FIRST)
    with path.open("a") as file:
        file.write(json.dumps({"windows": windows, "losses": losses, "seconds": 1.0}) + "\n")
    with BatchLog(path, {}, BATCHES) as log:
        assert log.finished == [FIRST]


def test_other_inputs_start_again_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with BatchLog(path, {"weights": "a", "settings": {"stride": 1, "by": "windows"}}, BATCHES) as log:
        log.append(FIRST)
    with BatchLog(path, {"weights": "b", "settings": {"stride": 2, "by": "windows"}}, BATCHES) as log:
        assert (log.finished, log.changed) == ([], ["weights", "settings.stride"])


@pytest.mark.parametrize(
    ("raised", "number"), [(Stopped(signal.SIGTERM), signal.SIGTERM), (KeyboardInterrupt(), signal.SIGINT)]
)
def test_a_signal_ends_with_how_to_go_on(raised: BaseException, number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    log = BatchLog(path, {}, BATCHES)
    log.append(FIRST)
    with pytest.raises(Interrupted) as caught, log:
        raise raised
    assert str(caught.value).startswith(f"Stopped by {number.name}. The losses of finished batches are in {path}; ")
    assert f"the same command with run_dir={tmp_path} " in str(caught.value)
    assert caught.value.exit_status == 128 + number
    with BatchLog(path, {}, BATCHES) as log:
        assert log.finished == [FIRST], "the file is not locked any more"


def test_two_evaluations_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with BatchLog(path, {}, BATCHES), pytest.raises(ConfigError, match="is being written by another evaluation"):
        BatchLog(path, {}, BATCHES)
    BatchLog(path, {}, BATCHES).close()


def figures(ended: Ended) -> dict[str, Any]:
    """All of result.json but for how long it took, and the rows of documents."""
    assert ended.status == 0, ended.err
    row = {name: value for name, value in ended.result.items() if name != "seconds"}
    row["against"] = {name: value for name, value in row["against"].items() if name != "seconds"}
    return row | {"documents": (ended.run_dir / "documents.jsonl").read_text()}


def settings(tiny_model: Path, texts: Path, tmp_path: Path) -> list[str]:
    return [
        f"checkpoint={tiny_model}", f"against={tiny_model}", f"data.path={texts}/held_out.txt",
        "data.sample_by=paragraph", "data.sequence_length=32", "stride=8", "perplexity.by=documents", "batch_size=4",
        f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip


def killed_and_continued(given: list[str], run_dir: Path, num_kills: int, seed: int) -> tuple[Ended, int]:
    """Kill the evaluation again and again after some more batches; return its end, and how often it was killed."""
    chance, kills = random.Random(seed), 0
    for _ in range(num_kills):
        run = Started("evaluate", run_dir, *given)
        files = [run_dir / name for name in ("losses.jsonl", "losses_against.jsonl")]
        size = sum(file.stat().st_size for file in files if file.exists())
        wanted, deadline = size + chance.randrange(0, 2500), time.monotonic() + 60
        while sum(file.stat().st_size for file in files if file.exists()) <= wanted and time.monotonic() < deadline:
            time.sleep(0.002)
            if (run_dir / "result.json").exists():
                break
        time.sleep(chance.random() * 0.01)
        os.kill(run.pid, signal.SIGKILL)
        kills += run.wait().status == -signal.SIGKILL
    return run_recipe("evaluate", run_dir, *given), kills


@pytest.mark.parametrize(
    ("num_kills", "seed"), [(2, 0), pytest.param(10, 1, marks=pytest.mark.slow)], ids=["2 kills", "10 kills"]
)
def test_an_evaluation_that_is_killed_goes_on(
    tiny_model: Path, texts: Path, tmp_path: Path, num_kills: int, seed: int
) -> None:
    given = settings(tiny_model, texts, tmp_path)
    expected = run_recipe("evaluate", tmp_path / "whole", *given)
    ended, kills = killed_and_continued(given, tmp_path / "killed", num_kills, seed)
    assert kills == num_kills
    assert "continuing after" in ended.out
    assert figures(ended) == figures(expected), "every bit of them"


@pytest.mark.long
def test_a_finished_evaluation_is_not_made_again(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given = settings(tiny_model, texts, tmp_path)
    first = run_recipe("evaluate", tmp_path / "run", *given)
    row = first.result
    assert "cpu" in first.out
    second = run_recipe("evaluate", tmp_path / "run", *given)
    assert (second.status, second.result) == (0, row), second.err
    assert "3 blocks" not in second.out, "no model was loaded"
    changed = run_recipe("evaluate", tmp_path / "run", *given, "stride=16")
    assert changed.status == 0, changed.err
    assert "starting again, as " in changed.out
    assert "settings.stride" in changed.out


@pytest.mark.long
def test_another_config_of_the_same_weights_starts_again(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    given = (f"checkpoint={model}", f"data.path={texts}/held_out.txt", f"data.cache_dir={tmp_path}/cache")
    first = run_recipe("evaluate", tmp_path / "run", *given).result
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))  # which changes no figure
    assert run_recipe("evaluate", tmp_path / "run", *given).result == first
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    changed = ended.result
    assert "starting again, as " in ended.out
    assert changed["loss"] != first["loss"]
    weights = [row["provenance"]["weights"] for row in (first, changed)]
    assert weights[0]["digest"] == weights[1]["digest"]
    assert weights[0]["config"] != weights[1]["config"]
