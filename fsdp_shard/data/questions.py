"""Prompts in the form that a model trained on such rows expects, with the answers in the data, for evaluations."""

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

_ROWS_AT_ONCE = 256  # tokenizers are faster in batches


class QuestionRow(NamedTuple):
    """A row of the data.

    Attributes:
        where: File and line, or number, of the row.
        name: The value of its id or name column; None without one.
        question: Its prompt and answer; None if it is skipped.
        skip_reason: Reason for skipping it; empty if it is not skipped.
    """

    where: str
    name: str | int | None
    question: Question | None
    skip_reason: str


def read_questions(config: DataConfig, tokenizer: Tokenizer, task: str) -> Iterator[QuestionRow]:
    """Read `data.eval_path`, or else data.path.

    Args:
        config: The data settings. With `data.kind=chat`, the answer is the assistant's last turn, and the prompt is the
            conversation before it.
        tokenizer: The model's tokenizer.
        task: The task of the model: causal_lm or seq2seq.

    Yields:
        The rows, in order.

    Raises:
        DataError: The data cannot be read, or the tokenizer or its chat template does not support it.
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
    """Render a conversation up to the assistant's answer, as in training with `data.kind=chat`.

    Args:
        values: `messages`, and `tools` and `system` if present.
        where: File and line, for messages.
        tokenizer: The model's tokenizer, with a chat template.

    Returns:
        The text, with the special tokens of the template.

    Raises:
        DataError: The messages cannot be read, or the chat template rejects them.
    """
    conversation = read_conversation(Row(where, dict(values)), "messages", {})
    return chat_spans.Renderer(tokenizer, conversation).render_prompt()
