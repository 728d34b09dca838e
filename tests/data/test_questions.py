"""Prompts with the answers of the data: what a model reads is what training has before the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data import DataConfig, read_questions
from fsdp_shard.data.config import kind_of
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import DataError
from fsdp_shard.models import CAUSAL, SEQ2SEQ
from tests.data.chat_templates import FAMILIES
from tests.data.chat_tokenizers import rendered, tokenizer_of
from tests.data.conversations import TOOLS, conversation, tool_conversation
from tests.support.tiny import byte_tokenizer


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("task", [CAUSAL, SEQ2SEQ])
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("pairs", {"source": "one {source}", "target": "two"}),
        ("instruction", {"instruction": "add", "input": "1 2", "output": "3"}),
        ("instruction", {"instruction": "add", "output": "nothing"}),
    ],
)
def test_tokens_are_those_before_the_answer_in_training(
    task: str, kind: str, row: dict[str, Any], tmp_path: Path
) -> None:
    config, tokenizer = DataConfig(kind=kind, path=written(tmp_path / "rows.jsonl", row)), byte_tokenizer()
    (found,) = read_questions(config, tokenizer, task)
    ((example,),) = kind_of(config, task).encode([Row("row", row)], tokenizer)
    assert found.question is not None
    assert found.question.ids == example.ids[: int(np.argmax(example.predicted))]
    assert tokenizer.decode(found.question.ids) == found.question.prompt
    assert found.question.reference == row.get("target", row.get("output"))


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_end_where_the_answer_begins(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    chat, tokenizer = conversation(family), tokenizer_of(family)
    path = written(tmp_path / "rows.jsonl", {"messages": [*chat, {"role": "user", "content": "and?"}]})
    (found,) = read_questions(DataConfig(kind="chat", path=path), tokenizer, CAUSAL)
    assert found.question is not None
    assert found.question.prompt == rendered(family, chat[:-1], prompt=True)
    assert found.question.reference == chat[-1]["content"]
    assert tokenizer.decode(found.question.ids) == found.question.prompt


def test_conversations_with_tools(tmp_path: Path) -> None:
    family, chat = FAMILIES["qwen2"], tool_conversation("qwen2")
    path = written(tmp_path / "rows.jsonl", {"messages": chat, "tools": TOOLS})
    (found,) = read_questions(DataConfig(kind="chat", path=path), tokenizer_of(family), CAUSAL)
    assert found.question is not None
    for message in chat:
        for call in message.get("tool_calls", ()):
            call.pop("id", None)
    assert found.question.prompt == rendered(family, chat[:-1], TOOLS, prompt=True)


def test_what_asks_nothing_is_left_out(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows: list[dict[str, Any]] = [
        {"id": 7, "messages": [user, answer]},
        {"messages": [user]},  # nothing to compare with
        {"messages": [answer]},  # nothing to answer
        {"messages": [user, {"role": "assistant", "tool_calls": [call]}]},  # no text
    ]
    config = DataConfig(kind="chat", path=written(tmp_path / "rows.jsonl", *rows))
    found = list(read_questions(config, tokenizer_of(FAMILIES["chatml"]), CAUSAL))
    assert [row.skip_reason for row in found] == ["", *["without prompt or answer"] * 3]
    assert [row.question is None for row in found] == [False, True, True, True]
    assert found[0].name == 7
    assert found[3].where.endswith("rows.jsonl, line 4")


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    family = FAMILIES["chatml"]._replace(template="{{ raise_exception('no chats on Sundays') }}")
    rows = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    config = DataConfig(kind="chat", path=written(tmp_path / "rows.jsonl", rows))
    with pytest.raises(DataError, match=r"line 1: the chat template .* rejects the conversation: no chats on Sundays"):
        list(read_questions(config, tokenizer_of(family), CAUSAL))
