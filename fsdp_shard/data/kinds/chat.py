"""`data.kind=chat`: conversations rendered by a chat template; only the assistant's turns are predicted."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fsdp_shard.data.kinds import chat_spans, kind
from fsdp_shard.data.kinds.conversation import COLUMNS, Conversation, check_role_names, check_roles, read_conversation
from fsdp_shard.data.kinds.kind import CAUSAL, Example, Kind, Question, RowSettings, Tokenizer
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import tokenizer_files
from fsdp_shard.utils import Parsed, first_line, setting


@dataclass(frozen=True)
class ChatKind(Kind):
    """`column` has the messages; None: it is found by its name. `roles` maps role names of the data to roles."""

    chosen_by, version = "data.kind=chat", "chat-2"

    column: str | None
    roles: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, "system", "tools") if self.column else COLUMNS

    def read(self, row: Row) -> Conversation | None:
        self.require(row)
        read = read_conversation(row, self.column, self.roles)
        # Unknown roles are counted over more than one row.
        return read if read.unknown or any(message["role"] == "assistant" for message in read.messages) else None

    def check_rows(self, rows: Sequence[Row]) -> bool:
        read = [one for row in rows if (one := self.read(row)) is not None]
        check_roles(read)
        return bool(read)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        from jinja2 import TemplateSyntaxError

        if not tokenizer.chat_template:
            raise DataError(
                f"data.kind=chat needs a chat template, but the model's tokenizer has none "
                f"({tokenizer_files(tokenizer)}). Set data.chat_template to a file with one, start from an instruction-"
                "tuned model, or use data.kind=instruction."
            )
        if not tokenizer.is_fast:
            raise DataError(
                "data.kind=chat needs the offsets of tokens in the text, which the model's slow tokenizer does not "
                "compute; save it as a fast tokenizer, with a tokenizer.json."
            )
        try:
            tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                f"{tokenizer_files(tokenizer)}: {first_line(error)} Set data.chat_template to one of these names."
            ) from error
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise DataError(
                f"The chat template of {tokenizer_files(tokenizer)} is not valid, line {error.lineno}: {error}. "
                "Correct it."
            ) from error
        except Exception:  # a template is a program
            pass  # it rejects this conversation

    def examples(self, read: list[Conversation], tokenizer: Tokenizer) -> list[list[Example]]:
        check_roles(read)
        ends = chat_spans.end_marks(tokenizer)
        rendered = [chat_spans.Renderer(tokenizer, one, ends).render() for one in read]
        texts = [text for text, _ in rendered]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            [Example(list(ids), chat_spans.inside(offsets, spans))] if spans else []
            for ids, offsets, (_, spans) in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        ]

    def questions(self, read: list[Conversation], tokenizer: Tokenizer) -> list[Question | None]:
        check_roles(read)
        return [self._question(one, tokenizer) for one in read]

    def _question(self, conversation: Conversation, tokenizer: Tokenizer) -> Question | None:
        """Return what comes before the last turn of the assistant, and the text of that turn."""
        messages = conversation.messages
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        answer = messages[last].get("content")
        if last == 0 or not isinstance(answer, str) or not answer.strip():
            return None
        before = conversation._replace(messages=messages[:last])
        prompt = chat_spans.Renderer(tokenizer, before, ()).render_prompt()
        return Question(prompt, kind.token_ids([prompt], tokenizer, add_special_tokens=False)[0], answer)

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        message = {"role": "user", "content": text}
        try:
            ids: Any = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program
            raise DataError(
                f"The chat template of {tokenizer_files(tokenizer)} fails with a single user's message: "
                f"{first_line(error)} Set data.chat_template to another one."
            ) from error
        return list(ids)


def _read_template(value: str | None, name: str) -> str | None:
    """Return the content of the file `value`; None if it is no file, but may be the name of a template."""
    path = Path(value or "").expanduser()
    try:
        if value and (path.is_file() or path.suffix or len(path.parts) > 1):
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={value} cannot be read: {error}. Give a file with a Jinja template.") from error
    return None


@dataclass
class ChatSettings(RowSettings):
    """Settings of `data.kind=chat`."""

    name = "chat"
    help = "a conversation, in which the assistant's turns are predicted"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)

    messages_column: str | None = setting(
        None,
        "kind=chat: the column with the conversation. Default: messages, conversations, or Alpaca's columns; columns "
        "system and tools go along.",
    )
    roles: Any = setting(
        None, "kind=chat: role names of the data and the roles that they are, such as {bot: assistant, prompter: user}."
    )
    chat_template: str | None = setting(
        None,
        "kind=chat: a file with a Jinja template, or the name of one of the tokenizer's, to train with and save with "
        "the checkpoints. Default: that of the tokenizer.",
    )

    template_text = Parsed("chat_template", _read_template)

    def build_kind(self, task: str) -> Kind:
        return ChatKind(self.messages_column, dict(self.roles or {}))

    def check_kind(self, prefix: str) -> None:
        check_role_names(self.roles or {}, f"{prefix}roles")


def with_chat_template(tokenizer: Tokenizer, settings: ChatSettings) -> Tokenizer:
    """Return a copy of `tokenizer` whose only chat template is that of `data.chat_template`; itself if that is not set.

    Raises:
        DataError: The tokenizer has no template of that name, or has one with the name of the file.
    """
    name, text, own = settings.chat_template, settings.template_text, tokenizer.chat_template
    if name is None:
        return tokenizer
    templates = own if isinstance(own, dict) else {"default": own} if own else {}
    if (text is None) == (name not in templates):
        problem = "no file, and the tokenizer has no template of that name" if text is None else "a file and a template"
        raise DataError(
            f"data.chat_template={name} is {problem}; the tokenizer has {', '.join(templates) or 'none'}. Give the "
            f"path of a file with a Jinja template, or one of these names."
        )
    changed = copy.copy(tokenizer)
    changed.chat_template = templates[name] if text is None else text
    return changed
