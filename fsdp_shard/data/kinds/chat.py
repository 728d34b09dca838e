"""`data.kind=chat`: conversations rendered by the tokenizer's chat template; only the assistant's turns are predicted.

A template may mark the assistant's turns with {% generation %}, but most do not. Then the conversation is rendered
twice: unchanged, and with a marker instead of the content of each assistant message. The text between the markers is
the template's, and must surround the contents in the first rendering; otherwise the row is an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fsdp_shard.data.kinds.kind import CAUSAL, Example, Kind, RowSettings, Tokenizer, require_row
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.errors import DataError
from fsdp_shard.utils import first_line, setting

Message = dict[str, Any]
Span = tuple[int, int]

_COLUMNS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_AN_END = re.compile(r"end|eot|eom|eos|</|sep|return", re.IGNORECASE)
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class ChatKind:
    """`column` has a list of messages {role, content} or {from, value}; None: `messages` or `conversations`."""

    column: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.column else _COLUMNS

    def check_row(self, row: Row) -> bool:
        return any(message["role"] == "assistant" for message in self.messages(row))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "data.kind=chat needs a chat template, but the model's tokenizer has none. Put chat_template into its "
                "tokenizer_config.json (or into a file chat_template.jinja in that directory), start from an "
                "instruction-tuned model, or use data.kind=instruction."
            )
        if not tokenizer.is_fast:
            raise DataError(
                "data.kind=chat needs the offsets of tokens in the text, which the model's slow tokenizer does not "
                "compute; save it as a fast tokenizer, with a tokenizer.json."
            )

    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[Example]]:
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
        """Return the conversation of a row, each message with `role` and `content`."""
        found = [name for name in self.columns if name in row.values]
        column = next((name for name in found if row.values[name] is not None), (found or self.columns)[0])
        require_row(row, column, "data.messages_column", "chat")
        value = row.values[column]
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise DataError(f"{row.where}: column {column!r} is not a list of messages. Set data.messages_column.")
        return [_message(message, row.where) for message in value]


class _Renderer:
    """Applies the chat template of a tokenizer to one row; `where` names the row in messages."""

    def __init__(self, tokenizer: Tokenizer, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where

    def marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Render with a template that marks the assistant's turns; return the text and the marked spans."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {"chat_template": _template(self._tokenizer), **self._tokenizer.special_tokens_map}
        (text,), (spans,) = self._try(
            lambda: render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        )
        return text, [(int(start), int(end)) for start, end in spans]

    def unmarked(self, messages: list[Message], ends: tuple[str, ...]) -> tuple[str, list[Span]]:
        """Render with markers; return the text and the spans, each with the token that ends its turn."""
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        marks = [f"\ue000{number}\ue001" for number in range(len(said))]
        if any(not isinstance(words, str) or "\ue000" in words for words in said):
            raise self._refusal("the assistant's content is not text")
        remaining = iter(marks)
        replaced = [m | {"content": next(remaining)} if m["role"] == "assistant" else m for m in messages]
        text, outline = self._text(messages), self._text(replaced)
        spans, at, rest = [], 0, outline
        for words, mark in zip(said, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise self._refusal("the template drops some of the assistant's messages")
            at = self._expect(text, before, at)
            behind = rest.partition("\ue000")[0]  # the template may strip the content, and add white space
            ways = (words, words.strip(), words.lstrip(), words.rstrip())
            exact = next((way for way in ways if text.startswith(way + behind, at)), words.strip())
            start, at = at, self._expect(text, exact, at)
            if exact or words == exact:
                spans.append((start, at + _end_length(rest, ends)))
        if text[at:] != rest:
            raise self._refusal("the template's own text depends on the assistant's messages")
        return text, spans

    def _expect(self, text: str, piece: str, at: int) -> int:
        if not text.startswith(piece, at):
            raise self._refusal("the template changes the assistant's messages, or its own text depends on them")
        return at + len(piece)

    def _text(self, messages: list[Message]) -> str:
        return str(self._try(lambda: self._tokenizer.apply_chat_template(messages, tokenize=False)))

    def _try(self, render: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return render()
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{self._where}: the chat template rejects the conversation: {first_line(error)}"
            ) from error

    def _refusal(self, reason: str) -> DataError:
        return DataError(
            f"{self._where}: the assistant's tokens cannot be identified: {reason}. Give the tokenizer a chat template "
            f"that marks them with {{% generation %}}."
        )


def _template(tokenizer: Tokenizer) -> str:
    return str(tokenizer.get_chat_template())


def _end_marks(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the tokens that end a turn, longest first: end-of-text, and added tokens with a name such as <|im_end|>.

    Other added tokens do not count: without an end token, a turn is followed by the token that begins the next one.
    """
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    ends = {text for text in added if _AN_END.search(text)} | {str(tokenizer.eos_token or "")}
    return tuple(sorted(ends - {""}, key=lambda text: (-len(text), text)))


def _end_length(rest: str, ends: tuple[str, ...]) -> int:
    """Return the length of white space and an end token at the start of `rest`; 0 without an end token."""
    blank = len(rest) - len(rest.lstrip())
    mark = next((end for end in ends if rest.startswith(end, blank)), None)
    return 0 if mark is None else blank + len(mark)


def _inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it overlaps one of `spans`; both are in order."""
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


@dataclass
class ChatSettings(RowSettings):
    """Settings of `data.kind=chat`."""

    name = "chat"
    help = "a conversation, in which the assistant's turns are predicted"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)

    messages_column: str | None = setting(
        None, "kind=chat: the column with the conversation. Default: messages or conversations."
    )

    def build_kind(self, task: str) -> Kind:
        return ChatKind(self.messages_column)
