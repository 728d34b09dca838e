"""The file of completions: in order, gone on with, never another run's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.inference.config import GenerateSettings, GenerationSettings
from fsdp_shard.inference.generation.completions_file import CompletionsFile, completion_inputs
from fsdp_shard.inference.generation.prompts import Completion, Prompt

SETTINGS = GenerateSettings(checkpoint="x", prompts="p.txt")
WEIGHTS = [("model.safetensors", 10, 1)]
PROMPTS = [Prompt("a", ""), Prompt("b", "")]
MADE_OF = completion_inputs(SETTINGS, PROMPTS, 0, WEIGHTS)
ROWS = [Completion("a", "ü\u2028\n", 2), Completion("b", "", 1, [-0.5])]


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_each_completion_is_on_disk_when_it_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    for number, _ in enumerate(CompletionsFile(path, MADE_OF).append(iter(ROWS)), start=1):
        assert len(written(path)) == number
    assert written(path) == [
        {"prompt": "a", "completion": "ü\u2028\n", "num_new_tokens": 2},
        {"prompt": "b", "completion": "", "num_new_tokens": 1, "log_probabilities": [-0.5]},
    ]


def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    list(CompletionsFile(path, MADE_OF).append(iter(ROWS)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again = CompletionsFile(path, MADE_OF)
    assert (again.num_rows_before, again.num_new_tokens) == (1, 2)
    list(again.append(iter(ROWS[1:])))
    assert again.num_new_tokens == 3
    assert path.read_bytes() == whole
    assert CompletionsFile(path, MADE_OF).num_rows_before == 2


def test_a_row_that_is_no_completion(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    list(CompletionsFile(path, MADE_OF).append(iter(ROWS)))
    first = path.read_bytes().splitlines(keepends=True)[0]
    for row in (b"[]\n", b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(first + row)
        with pytest.raises(DataError, match=r"out\.jsonl, line 2, is not a completion; repair it, or delete"):
            CompletionsFile(path, MADE_OF)


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.jsonl").mkdir()
    with pytest.raises(ConfigError, match="file is a file, not a directory"):
        CompletionsFile(tmp_path / "file" / "in" / "out.jsonl", MADE_OF)
    with pytest.raises(DataError, match="it is not a file"):
        CompletionsFile(tmp_path / "directory.jsonl", MADE_OF)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    list(CompletionsFile(path, MADE_OF).append(iter(ROWS)))
    before = path.read_bytes()
    shorter = replace(SETTINGS, generation=GenerationSettings(max_new_tokens=3))
    for made_of, says in (
        (completion_inputs(SETTINGS, [PROMPTS[0], Prompt("c", "")], 0, WEIGHTS), "other values of prompts"),
        (completion_inputs(SETTINGS, PROMPTS, 1, WEIGHTS), "other values of seed"),
        (
            completion_inputs(SETTINGS, PROMPTS, 0, [("model.safetensors", 10, 2)]),
            "other values of state of the checkpoint",
        ),
        (completion_inputs(shorter, PROMPTS, 0, WEIGHTS), "generation"),
    ):
        with pytest.raises(DataError, match=says):
            CompletionsFile(path, made_of)
    for content in (b"\xff", b"[]", b"[" * 100_000):
        (tmp_path / ".out.jsonl.settings").write_bytes(content)
        with pytest.raises(DataError, match="other values of its settings"):
            CompletionsFile(path, MADE_OF)
    (tmp_path / ".out.jsonl.settings").unlink()
    with pytest.raises(DataError, match="which would record what its rows were made from"):
        CompletionsFile(path, MADE_OF)
    assert path.read_bytes() == before
