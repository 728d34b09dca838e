"""Prompts with the answers of the data, as a model that was trained on such rows is asked: for evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from fsdp_shard.data.config import DataConfig, kind_of
from fsdp_shard.data.documents import NAMES, name_of, open_evaluated
from fsdp_shard.data.kinds import chat_spans
from fsdp_shard.data.kinds.chat_template import with_chat_template
from fsdp_shard.data.kinds.conversation import read_conversation
from fsdp_shard.data.kinds.kind import Question, Tokenizer
from fsdp_shard.data.sources.row import Row

_ROWS_AT_ONCE = 256  # tokenizers are faster on many texts


class QuestionRow(NamedTuple):
    """A row of the data.

    Attributes:
        where: File and line or number of the row.
        name: What the data calls it, in a column id or name; None without one.
        question: Its prompt and answer; None if it is left out.
        left_out: Why it is left out; empty if it is not.
    """

    where: str
    name: str | int | None
    question: Question | None
    left_out: str


def read_questions(config: DataConfig, tokenizer: Tokenizer, task: str) -> Iterator[QuestionRow]:
    """Read `data.eval_path`, or data.path without it.

    Args:
        config: The settings of the data. Of `data.kind=chat`, the answer is the last turn of the assistant, and the
            prompt the conversation before it.
        tokenizer: The model's tokenizer.
        task: What the model was trained to do: causal_lm or seq2seq.

    Yields:
        The rows, in their order.

    Raises:
        DataError: The data cannot be read, or the tokenizer or its chat template does not suit it.
    """
    kind, tokenizer = kind_of(config, task), with_chat_template(tokenizer, config)
    if config.kind == "chat":
        kind.check_tokenizer(tokenizer)
    rows = open_evaluated(config).rows((*kind.columns, *NAMES))
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        read = [kind.read(row) for row in some]
        asked = iter(kind.questions([one for one in read if one is not None], tokenizer))
        for row, one in zip(some, read, strict=True):
            question = None if one is None else next(asked)
            reason = "without prompt or answer" if question is None else "" if question.ids else "without tokens"
            yield QuestionRow(row.where, name_of(row, kind.columns), None if reason else question, reason)


def render_conversation(values: Mapping[str, Any], where: str, tokenizer: Tokenizer) -> str:
    """Render a conversation up to where the assistant answers, as training on rows of `data.kind=chat` does.

    Args:
        values: `messages`, and `tools` and `system` if there are any.
        where: File and line, for messages.
        tokenizer: The model's tokenizer, with a chat template.

    Returns:
        The text, with the special tokens of the template.

    Raises:
        DataError: The messages cannot be read, or the chat template rejects them.
    """
    conversation = read_conversation(Row(where, dict(values)), "messages", {})
    return chat_spans.Renderer(tokenizer, conversation, ()).render_prompt()
