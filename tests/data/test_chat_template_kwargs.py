"""`data.chat_template_kwargs`: variables of a chat template, in training, in the saved template and in `generate`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdp_shard.checkpoint import locate
from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds.chat_template import with_chat_template, with_template_variables, writes_date
from fsdp_shard.data.pipeline import tokenize_all
from fsdp_shard.errors import DataError
from fsdp_shard.models import load_tokenizer
from tests.data.chat_tokenizers import chat_tokenizer
from tests.support.runs import run_recipe

# Begins with a newline, which is text. As Qwen 3's and Llama 3's: a switch, and the date of the day.
TEMPLATE = """
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}

{{ date_string }}
{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% if thinking is defined and thinking is false %}[]{% endif %}{% endif %}"""
VALUES = [False, True, 3, -2.5, 'it\'s "quoted" \\ {{ a }} {% b %}\nß 😀', ["a", 1], {"a": {"b": [True]}}]


def render(tokenizer: Any, **variables: Any) -> str:
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True, **variables
        )
    )


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("start", ["", "\n", "  \n", "{#- a -#}\n\n "])
def test_a_default_is_the_value_that_a_caller_would_give(value: Any, start: str) -> None:
    tokenizer = chat_tokenizer(start + "{{ a | tojson }}{{ messages[0]['content'] }}")
    changed = with_template_variables(tokenizer, {"a": value}, "x")
    assert render(changed) == render(tokenizer, a=value)
    assert render(changed, a="other") == render(tokenizer, a="other")
    assert tokenizer.chat_template != changed.chat_template


def test_variables_that_a_template_does_not_use() -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    with pytest.raises(DataError, match=r"kwargs\.think is not a variable that the chat .*uses \(.*; correct the"):
        with_template_variables(tokenizer, {"think": False}, "data.chat_template_kwargs")
    with pytest.raises(DataError, match=r"x\.eos_token is a special token of the tokenizer"):
        with_template_variables(tokenizer, {"eos_token": ""}, "x")
    for several, has in (({"default": "a", "tool_use": "b"}, "default, tool_use"), (None, "none")):
        tokenizer.chat_template = several
        with pytest.raises(DataError, match=f"x needs one chat template, and the tokenizer has {has}"):
            with_template_variables(tokenizer, {"a": 1}, "x")
    chosen = DataConfig(path="a", kind="chat", chat_template="b", chat_template_kwargs={"name": 1})
    tokenizer.chat_template = {"a": "", "b": "{{ name }}"}
    assert render(with_chat_template(tokenizer, chosen)) == "1"


def test_whether_a_template_writes_the_date() -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    assert writes_date(tokenizer)
    assert not writes_date(with_template_variables(tokenizer, {"date_string": "1 May 2026"}, "x"))
    assert not writes_date(chat_tokenizer("{{ messages }}"))
    assert not writes_date(chat_tokenizer("{{ raise_exception('no') }}"))


@pytest.fixture
def given(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer.save_pretrained(model)
    rows = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "x" * i}] for i in range(1, 20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = [f"data.path={tmp_path}/chats.jsonl", "data.kind=chat", "data.sequence_length=64"]
    return [f"model.path={model}", "launch.device=cpu", *data, "train.global_batch_size=4"]


@pytest.mark.parametrize("as_text", [False, True])
def test_preferences_between_conversations_are_dated_too(as_text: bool, tmp_path: Path) -> None:
    prompt, answers = [{"role": "user", "content": "1?"}], [{"role": "assistant", "content": end} for end in "ab"]
    row: dict[str, Any] = {"prompt": prompt, "chosen": answers[:1], "rejected": answers[1:]}
    if as_text:
        row = {"prompt": "1?", "chosen": "a", "rejected": "b"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(path=str(tmp_path / "pairs.jsonl"), kind="preference", cache_dir=str(tmp_path / "cache"))
    notes = tokenize_all(config, chat_tokenizer(TEMPLATE)).notes
    assert any("writes today's date" in note for note in notes) == (not as_text)


@pytest.mark.long
def test_a_run_its_checkpoints_and_what_they_generate(given: list[str], tmp_path: Path) -> None:
    dated = run_recipe("finetune", tmp_path / "dated", *given, "train.steps=1")
    assert dated.status == 0, dated.err
    assert "writes today's date into each conversation" in dated.out + dated.err
    variables = "data.chat_template_kwargs={date_string: 1 May 2026, thinking: false}"
    trained = run_recipe("finetune", tmp_path / "run", *given, variables, "train.steps=2")
    assert trained.status == 0, trained.err
    assert "today's date" not in trained.out + trained.err
    saved = load_tokenizer(locate(trained.checkpoint).tokenizer_directory)
    assert render(saved) == "\n1 May 2026\n<user>a</s><assistant>[]".replace("</s>", str(saved.eos_token))
    resumed = run_recipe("finetune", tmp_path / "run", *given, variables, "train.steps=3")
    assert resumed.status == 0, resumed.err
    refused = run_recipe("finetune", tmp_path / "run", *given, variables.replace("1 May", "2 May"), "train.steps=4")
    assert refused.status == 2
    assert "differ from those of the run to resume" in refused.err

    asked = [f"checkpoint={trained.checkpoint}", "prompt=a", "chat=true", "generation.max_new_tokens=2"]
    first = run_recipe("generate", tmp_path / "one", *asked, f"output={tmp_path}/out.jsonl")
    assert first.status == 0, first.err
    other = run_recipe(
        "generate", tmp_path / "two", *asked, f"output={tmp_path}/out.jsonl", "chat_template_kwargs={thinking: true}"
    )
    assert other.status == 2
    assert re.search(r"other values of .*chat_template_kwargs", other.err)
    wrong = run_recipe("generate", tmp_path / "three", *asked, "chat_template_kwargs={thinkng: true}")
    assert wrong.status == 2
    assert "chat_template_kwargs.thinkng is not a variable that the chat template uses" in wrong.err
