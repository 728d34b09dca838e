"""`data.kind=chat`: conversations rendered by a chat template; only the assistant's turns are predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.data.kinds import chat_spans, kind
from fsdp_shard.data.kinds.chat_template import TemplateSettings, check_template, user_prompt
from fsdp_shard.data.kinds.conversation import COLUMNS, Conversation, check_roles, read_conversation
from fsdp_shard.data.kinds.kind import ROWS, Example, Kind, Question, Tokenizer
from fsdp_shard.data.sources.row import Row
from fsdp_shard.models import CAUSAL
from fsdp_shard.utils import setting

CHAT = "chat"


@dataclass(frozen=True)
class ChatKind(Kind):
    """`column` holds the messages; if None, it is found by its name. `roles` maps the data's role names to roles."""

    chosen_by, version = "data.kind=chat", "chat-3"

    column: str | None
    roles: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, "system", "tools") if self.column else COLUMNS

    def read(self, row: Row) -> Conversation | None:
        self.require(row)
        read = read_conversation(row, self.column, self.roles)
        # Unknown roles are reported for all rows together.
        return read if read.unknown or read.trained_messages else None

    def check_rows(self, rows: Sequence[Row], samples: str = ROWS) -> bool:
        read = [one for row in rows if (one := self.read(row)) is not None]
        check_roles(read)
        return bool(read)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        check_template(tokenizer, self.chosen_by, "use data.kind=instruction")

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
        """Return the conversation before the assistant's last turn, and the text of that turn."""
        messages = conversation.messages
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        answer = messages[last].get("content")
        if last == 0 or last not in conversation.trained_messages or not isinstance(answer, str) or not answer.strip():
            return None
        before = conversation._replace(messages=messages[:last])
        prompt = chat_spans.Renderer(tokenizer, before).render_prompt()
        return Question(prompt, kind.token_ids([prompt], tokenizer, add_special_tokens=False)[0], answer)

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        return user_prompt(text, tokenizer)


@dataclass
class ChatSettings(TemplateSettings):
    """Settings of `data.kind=chat`."""

    name = CHAT
    help = "a conversation, in which the assistant's turns are predicted"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)

    messages_column: str | None = setting(
        None,
        "kind=chat: the column with the conversation. Default: messages, conversations, or Alpaca's columns; the "
        "columns system and tools are also used.",
    )

    def build_kind(self, task: str) -> Kind:
        return ChatKind(self.messages_column, dict(self.roles or {}))
