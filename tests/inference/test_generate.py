"""`fsdp-shard generate` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.checkpoint import convert
from tests.support.runs import Ended, run_recipe

FIGURES = {
    "status", "num_prompts", "num_new_tokens", "load_seconds", "first_token_seconds", "tokens_per_second",
    "peak_memory_bytes", "device_map", "disk_bytes_per_token", "output",
}  # fmt: skip
TEXTS = ("abc", "de", "a longer one", "fgh", "x")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def generate(run_dir: Path, *overrides: str) -> Ended:
    return run_recipe("generate", run_dir, "generation.max_new_tokens=5", "generation.batch_size=2", *overrides)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_prompt_file_becomes_an_output_file(tiny_model: Path, tmp_path: Path, prompts: Path) -> None:
    output = tmp_path / "out.jsonl"
    settings = [f"checkpoint={tiny_model}", f"prompts={prompts}", f"output={output}"]
    settings += ["generation.output_scores=true", "generation.do_sample=true"]
    ended = generate(tmp_path / "run", *settings, "dispatch.max_memory={cpu: 120kB}")
    assert ended.status == 0, ended.err
    assert tuple(row["prompt"] for row in rows(output)) == TEXTS
    assert sum(row["num_new_tokens"] for row in rows(output)) == ended.result["num_new_tokens"]
    assert all(len(row["log_probabilities"]) == row["num_new_tokens"] for row in rows(output))
    assert set(ended.result) >= FIGURES
    assert (ended.result["status"], ended.result["num_prompts"]) == ("completed", 5)
    assert set(ended.result["device_map"].values()) == {"cpu", "disk"}
    assert "for the KV cache" in ended.out
    assert "> fgh" in ended.out

    # What was cut short goes on, and ends with the same file; one of other settings is left alone.
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]) + b'{"prompt": "a lo')
    again = generate(tmp_path / "again", *settings)
    assert again.status == 0, again.err
    assert "2 of 5 completions exist already" in again.out
    assert "5 completions (3 by this run), " in again.out
    assert again.result["num_new_tokens"] == ended.result["num_new_tokens"]
    assert [{**row, "log_probabilities": 0} for row in rows(output)] == [
        {**json.loads(line), "log_probabilities": 0} for line in whole.splitlines()
    ]
    other = generate(tmp_path / "other", *settings, "seed=1")
    assert (other.status, other.err.count("error: ")) == (2, 1)
    assert "other values of seed" in other.err
    assert len(rows(output)) == 5


def test_one_prompt_is_streamed_and_its_completion_is_in_the_run_directory(tiny_model: Path, tmp_path: Path) -> None:
    ended = generate(
        tmp_path, f"checkpoint={tiny_model}", "prompt=ab, c", "dispatch.device_map={*: disk, model.norm: cpu}"
    )
    assert ended.status == 0, ended.err
    (row,) = rows(tmp_path / "completions.jsonl")
    assert row["prompt"] == "ab, c"
    assert "> ab, c\n" in ended.out
    assert [fqn for fqn, device in ended.result["device_map"].items() if device != "disk"] == ["model.norm"]


@pytest.mark.long
def test_what_cannot_be_is_one_error_each_and_leaves_nothing(tiny_model: Path, tmp_path: Path, prompts: Path) -> None:
    bad, empty, mute = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl", tmp_path / "mute"
    bad.write_text('{"prompt": "a"}\nnonsense\n')
    empty.write_text('{"prompt": "a"}\n{"prompt": " "}\n')
    shutil.copytree(tiny_model, mute, ignore=shutil.ignore_patterns("token*"))
    model = f"checkpoint={tiny_model}"
    for overrides, says in (
        ((f"checkpoint={tmp_path / 'nowhere'}", "prompt=a"), "nowhere"),
        ((f"checkpoint={mute}", "prompt=a"), "no usable tokenizer"),
        ((model, f"prompts={bad}"), "line 2, is not JSON"),
        ((model, f"prompts={empty}"), "line 2, is an empty prompt"),
        ((model, "prompt= "), "prompt is empty"),
        ((model, "seed=1"), "neither is given"),
        ((model, "prompt=a", "seed=7"), "seed=7 has no effect while generation.do_sample=false"),
        ((model, "prompt=a", "dispatch.device_map={model: 7, lm_head: 7}"), "names GPU 7"),
        ((model, "prompt=a", "dispatch.max_memory={cpu: lots}"), "max_memory.cpu=lots is not a size"),
        ((model, "prompt=a", "dispatch.max_memory={cpu: 20kB}"), "too little. Give cpu: "),
        ((model, "prompt=a", "generation.max_new_tokens=-1"), "max_new_tokens=-1 is out of range"),
        ((model, "chat=true"), "needs a chat template"),
        ((model, "chat=true", "output=a.jsonl"), "has no effect"),
        ((model, "prompt=a", "generation.cache=offloaded"), "cache=offloaded has no effect"),
    ):
        ended = generate(tmp_path / "run", *overrides)
        assert (ended.status, ended.err.count("error: ")) == (2, 1), (overrides, ended.err)
        assert says in ended.err, ended.err
        assert "Traceback" not in ended.err
        assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.long
def test_several_ranks_share_the_prompts(tiny_model: Path, tmp_path: Path, prompts: Path) -> None:
    convert(tiny_model, tmp_path / "ranks", format="sharded", ranks=2)
    settings = (f"checkpoint={tmp_path / 'ranks'}", f"prompts={prompts}", "generation.do_sample=true")
    alone = generate(tmp_path / "alone", *settings)
    shared = generate(tmp_path / "shared", *settings, "launch.ranks=2", "launch.device=cpu")
    assert (alone.status, shared.status) == (0, 0), alone.err + shared.err
    assert rows(tmp_path / "shared/completions.jsonl") == rows(tmp_path / "alone/completions.jsonl")
    assert shared.result["num_new_tokens"] == alone.result["num_new_tokens"]
    assert shared.out.count("completions, ") == 1


def test_rows_of_messages_are_answered_as_conversations(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": role, "content": role * 2} for role in ("user", "assistant", "user")]
    asked: list[dict[str, Any]] = [
        {"messages": messages},
        {"prompt": "abc"},
        {"messages": [{"role": "user", "content": "abc"}]},
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = (f"checkpoint={model}", f"prompts={tmp_path / 'asked.jsonl'}", f"output={tmp_path / 'out.jsonl'}")
    ended = generate(tmp_path / "run", *settings, "chat=true")
    assert ended.status == 0, ended.err
    chat, plain, same = rows(tmp_path / "out.jsonl")
    assert (chat["messages"], chat["prompt"]) == (messages, "useruser")
    assert "messages" not in plain
    assert same["completion"] == plain["completion"]

    (tmp_path / "asked.jsonl").write_text(json.dumps(asked[0] | {"messages": messages[2:]}))
    other = generate(tmp_path / "run", *settings, "chat=true")
    assert other.status == 2
    assert "other values of prompts" in other.err
    refused = generate(tmp_path / "run", settings[0], settings[1])
    assert refused.status == 2
    assert "has messages, which go through the model's chat template; set chat=true" in refused.err


def test_a_chat_template_of_a_file_or_a_name(tiny_model: Path, tmp_path: Path) -> None:
    template, name = tmp_path / "quoted.jinja", "quoted"
    template.write_text("<{{ messages[0]['content'] }}>")
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    shutil.copy(template, model / "additional_chat_templates")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    asked = ("prompt=abc", "chat=true")

    def completion(number: int, *settings: str) -> str:
        ended = generate(tmp_path / f"run{number}", *settings)
        assert ended.status == 0, ended.err
        return str(rows(tmp_path / f"run{number}" / "completions.jsonl")[0]["completion"])

    expected = completion(1, f"checkpoint={tiny_model}", "prompt=<abc>")
    assert completion(2, f"checkpoint={tiny_model}", *asked, f"chat_template={template}") == expected
    assert completion(3, f"checkpoint={model}", *asked, f"chat_template={name}") == expected
    assert completion(4, f"checkpoint={model}", *asked) != expected

    unknown = generate(tmp_path / "run5", f"checkpoint={model}", *asked, "chat_template=rag")
    assert unknown.status == 2
    assert "chat_template=rag is no file, and the tokenizer has no template of that name; the" in unknown.err
    template.write_text("({{ messages[0]['content'] }})")
    other = generate(tmp_path / "run2", f"checkpoint={tiny_model}", *asked, f"chat_template={template}")
    assert other.status == 2
    assert "other values of chat_template" in other.err
