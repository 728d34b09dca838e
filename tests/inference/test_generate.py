"""`fsdp-shard generate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runs import run_recipe

FIGURES = {
    "status", "num_prompts", "num_new_tokens", "load_seconds", "first_token_seconds", "tokens_per_second",
    "peak_memory_bytes", "device_map",
}  # fmt: skip


def test_a_prompt_file_becomes_an_output_file(tiny_model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "de", "fgh")))
    ended = run_recipe(
        "generate", tmp_path / "run", f"checkpoint={tiny_model}", f"prompts={prompts}", f"output={output}",
        "dispatch.max_memory={cpu: 110kB}", "generation.max_new_tokens=5", "generation.batch_size=2",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["abc", "de", "fgh"]
    assert sum(row["num_new_tokens"] for row in rows) == ended.result["num_new_tokens"]
    assert set(ended.result) >= FIGURES
    assert ended.result["status"] == "completed"
    assert ended.result["num_prompts"] == 3
    assert set(ended.result["device_map"].values()) == {"cpu", "disk"}
    assert "disk 2 blocks" in ended.out
    assert "> fgh" in ended.out


def test_one_prompt_gets_its_completion_in_the_run_directory(tiny_model: Path, tmp_path: Path) -> None:
    ended = run_recipe(
        "generate", tmp_path, f"checkpoint={tiny_model}", "prompt='ab, c'", "dispatch.device_map=disk",
        "generation.max_new_tokens=3",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    (row,) = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert json.loads(row)["prompt"] == "ab, c"
    assert set(ended.result["device_map"].values()) == {"disk"}


def test_bad_input_is_one_error_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\nnonsense\n')
    for override, says in (
        (f"prompts={prompts}", "line 2, is not JSON"),
        ("seed=1", "neither is given"),
    ):
        ended = run_recipe("generate", tmp_path / "run", f"checkpoint={tiny_model}", override)
        assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
        assert says in ended.err
        assert "Traceback" not in ended.err
    ended = run_recipe("generate", tmp_path / "run", f"checkpoint={tmp_path / 'nowhere'}", "prompt=a")
    assert ended.status == 2
    assert "nowhere" in ended.err
    assert not (tmp_path / "run").exists()
