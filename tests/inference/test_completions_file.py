"""The file of completions: in order, gone on with, never another run's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_shard.errors import DataError
from fsdp_shard.inference.config import GenerateSettings, GenerationSettings
from fsdp_shard.inference.generation.completions_file import OutputFile, ingredients
from fsdp_shard.inference.generation.prompts import Completion

SETTINGS = GenerateSettings(checkpoint="x", prompts="p.txt")
WEIGHTS = [("model.safetensors", 10, 1)]
MADE_OF = ingredients(SETTINGS, ["a", "b"], 0, WEIGHTS)
ROWS = [Completion("a", "ü\u2028\n", 2), Completion("b", "", 1, [-0.5])]


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_each_completion_is_on_disk_when_it_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    for number, _ in enumerate(OutputFile(path, MADE_OF).append(iter(ROWS)), start=1):
        assert len(written(path)) == number
    assert written(path) == [
        {"prompt": "a", "completion": "ü\u2028\n", "num_new_tokens": 2},
        {"prompt": "b", "completion": "", "num_new_tokens": 1, "log_probabilities": [-0.5]},
    ]


def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    list(OutputFile(path, MADE_OF).append(iter(ROWS)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again = OutputFile(path, MADE_OF)
    assert [row["prompt"] for row in again.rows] == ["a"]
    list(again.append(iter(ROWS[1:])))
    assert path.read_bytes() == whole
    assert len(OutputFile(path, MADE_OF).rows) == 2


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.jsonl").mkdir()
    with pytest.raises(DataError, match="file is no directory"):
        OutputFile(tmp_path / "file" / "in" / "out.jsonl", MADE_OF)
    with pytest.raises(DataError, match="is a directory"):
        OutputFile(tmp_path / "directory.jsonl", MADE_OF)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    list(OutputFile(path, MADE_OF).append(iter(ROWS)))
    before = path.read_bytes()
    shorter = replace(SETTINGS, generation=GenerationSettings(max_new_tokens=3))
    for made_of, says in (
        (ingredients(SETTINGS, ["a", "c"], 0, WEIGHTS), "of another prompts"),
        (ingredients(SETTINGS, ["a", "b"], 1, WEIGHTS), "of another seed"),
        (ingredients(SETTINGS, ["a", "b"], 0, [("model.safetensors", 10, 2)]), "of another state of the checkpoint"),
        (ingredients(shorter, ["a", "b"], 0, WEIGHTS), "generation"),
    ):
        with pytest.raises(DataError, match=says):
            OutputFile(path, made_of)
    (tmp_path / ".out.jsonl.settings").unlink()
    with pytest.raises(DataError, match="nothing says what its rows were made of"):
        OutputFile(path, MADE_OF)
    assert path.read_bytes() == before
