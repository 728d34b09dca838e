"""`data.kind=chat`: conversations through the tokenizer's own template, the assistant's words alone predicted.

A template may mark the assistant's words with {% generation %}. Most do not. Then the conversation is rendered twice:
as it is, and with a mark of ours in place of each thing that the assistant said. What stands between the marks is the
template's own, and must be found around the words in the first text, or the row is refused: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.data.kinds.kind import Example, require_row
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]

_COLUMNS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_AN_END = re.compile(r"end|eot|eom|eos|</|sep|return", re.IGNORECASE)
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class ChatKind:
    """`column` holds a list of messages {role, content} or {from, value}; None: whichever of the usual names it has."""

    column: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.column else _COLUMNS

    def check_row(self, row: Row) -> bool:
        return any(message["role"] == "assistant" for message in self.messages(row))

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "data.kind=chat needs a chat template, but the model's tokenizer has none. Put chat_template into its "
                "tokenizer_config.json (or a file chat_template.jinja beside it), start from an instruction-tuned "
                "model, or use data.kind=instruction."
            )
        if not tokenizer.is_fast:
            raise DataError(
                "data.kind=chat must know where each token lies in the text, which the model's slow tokenizer does not "
                "tell; save it with a tokenizer.json."
            )

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        marked = _GENERATION.search(_template(tokenizer)) is not None
        ends = _end_marks(tokenizer)
        texts, spans = [], []
        for row in rows:
            render = _Renderer(tokenizer, row.where)
            text, found = (render.marked if marked else lambda m, r=render: r.unmarked(m, ends))(self.messages(row))
            texts.append(text)
            spans.append(found)
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            [Example(list(ids), _inside(offsets, found))] if found else []
            for ids, offsets, found in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        ]

    def fingerprint(self) -> Any:
        return ["chat", asdict(self)]

    def messages(self, row: Row) -> list[Message]:
        """The conversation of a row, its messages with `role` and `content`."""
        there = [name for name in self.columns if name in row.values]
        column = next((name for name in there if row.values[name] is not None), (there or self.columns)[0])
        require_row(row, column, "data.messages_column", "chat")
        value = row.values[column]
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise DataError(f"{row.where}: column {column!r} is no list of messages. Set data.messages_column.")
        return [_message(message, row.where) for message in value]


class _Renderer:
    """The template of a tokenizer, applied to the row at `where`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where

    def marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Text and spans of the assistant's words by the template's own marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {"chat_template": _template(self._tokenizer), **self._tokenizer.special_tokens_map}
        (text,), (spans,) = self._try(
            lambda: render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        )
        return text, [(int(start), int(end)) for start, end in spans]

    def unmarked(self, messages: list[Message], ends: tuple[str, ...]) -> tuple[str, list[Span]]:
        """Text and spans by comparison with a text that has marks of ours. A span has the token that ends the turn."""
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        marks = [f"\ue000{number}\ue001" for number in range(len(said))]
        if any(not isinstance(words, str) or "\ue000" in words for words in said):
            raise self._refusal("the assistant's content is not text")
        places = iter(marks)
        replaced = [m | {"content": next(places)} if m["role"] == "assistant" else m for m in messages]
        text, outline = self._text(messages), self._text(replaced)
        spans, at, rest = [], 0, outline
        for words, mark in zip(said, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise self._refusal("the template leaves some of the assistant's words out")
            at = self._expect(text, before, at)
            behind = rest.partition("\ue000")[0]  # the template may strip words, and put blanks of its own behind them
            ways = (words, words.strip(), words.lstrip(), words.rstrip())
            exact = next((way for way in ways if text.startswith(way + behind, at)), words.strip())
            start, at = at, self._expect(text, exact, at)
            if exact or words == exact:
                spans.append((start, at + _end_length(rest, ends)))
        if text[at:] != rest:
            raise self._refusal("the template changes with what the assistant said")
        return text, spans

    def _expect(self, text: str, piece: str, at: int) -> int:
        if not text.startswith(piece, at):
            raise self._refusal("the template changes the assistant's words, or changes with them")
        return at + len(piece)

    def _text(self, messages: list[Message]) -> str:
        return str(self._try(lambda: self._tokenizer.apply_chat_template(messages, tokenize=False)))

    def _try(self, render: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return render()
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{self._where}: the chat template refuses the conversation: {reason}") from error

    def _refusal(self, reason: str) -> DataError:
        return DataError(
            f"{self._where}: which tokens are the assistant's cannot be told, as {reason}. Give the tokenizer a chat "
            f"template that marks them with {{% generation %}}."
        )


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.get_chat_template())


def _end_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of the tokens that end a turn, the longest first: end-of-text, and added tokens that are called an end.

    Not every added token after the words: without an end of its own, a turn is followed by the beginning of the next.
    """
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    ends = {text for text in added if _AN_END.search(text)} | {str(tokenizer.eos_token or "")}
    return tuple(sorted(ends - {""}, key=lambda text: (-len(text), text)))


def _end_length(rest: str, ends: tuple[str, ...]) -> int:
    """Length of white space and an end mark at the beginning of `rest`; 0 when there is no such mark."""
    blank = len(rest) - len(rest.lstrip())
    mark = next((end for end in ends if rest.startswith(end, blank)), None)
    return 0 if mark is None else blank + len(mark)


def _inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens have a character in one of `spans`, both in order."""
    inside, number = [], 0
    for start, end in offsets:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        inside.append(number < len(spans) and start < spans[number][1] and end > spans[number][0])
    return inside


def _message(message: Mapping[str, Any], where: str) -> Message:
    if "role" in message and "content" in message:
        return {key: value for key, value in message.items() if value is not None or key == "content"}
    if "from" in message and "value" in message:
        role = str(message["from"])
        return {"role": _ROLES.get(role, role), "content": message["value"]}
    raise DataError(f"{where}: a message has {', '.join(message) or 'nothing'}; expected role and content.")
