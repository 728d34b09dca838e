"""Where the assistant's turns are in a conversation that a chat template has rendered.

A template may mark them with {% generation %}, but most do not. Then the conversation is rendered twice: as it is, and
with a marker instead of each text of the assistant: reasoning, content and the names of tool calls. What is between
the markers is the template's, and must surround the texts in the first rendering; otherwise the row is an error.

A tool call begins where the conversation up to it differs from one in which the assistant says something instead, and
ends where that conversation ends. Reasoning begins where the generation prompt ends.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from fsdp_shard.data.kinds.conversation import Conversation, Message
from fsdp_shard.data.kinds.kind import Tokenizer
from fsdp_shard.errors import DataError
from fsdp_shard.utils import first_line

Span = tuple[int, int]

_AN_END = re.compile(r"end|eot|eom|eos|</|sep|return", re.IGNORECASE)
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MARK = re.compile("\ue000([0-9]+)\ue001")
_PROBE = {"probe of the arguments": 1}
_THINKS = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)


class _Piece(NamedTuple):
    """A text of the assistant in message number `message`: its reasoning, its text, or the name of a tool."""

    message: int
    what: str
    words: str


class _Found(NamedTuple):
    """Where a piece is, and what the template puts before and behind it."""

    start: int
    stop: int
    before: str
    behind: str


class Renderer:
    """Applies the chat template of a tokenizer to one conversation; `ends` are the tokens that end a turn."""

    def __init__(self, tokenizer: Tokenizer, conversation: Conversation, ends: tuple[str, ...]) -> None:
        self._messages, self._where, self._ends = conversation.messages, conversation.where, ends
        template = str(tokenizer.get_chat_template(tools=conversation.tools))
        self._marks = _GENERATION.search(template) is not None
        self._options: dict[str, Any] = {"chat_template": template, "tools": conversation.tools}
        self._options |= {"return_assistant_tokens_mask": self._marks, **tokenizer.special_tokens_map}
        if conversation.tools and not re.search(r"\btools\b", template):
            raise DataError(
                f"{self._where} has definitions of tools, which the chat template does not use. Set data.chat_template "
                f"to one that does, or remove the column 'tools'."
            )

    def render(self) -> tuple[str, list[Span]]:
        """Return the text and the spans of the assistant's turns, each with the token that ends it.

        Raises:
            DataError: The template rejects the conversation, or the spans cannot be identified.
        """
        from jinja2 import TemplateError

        rejected: Exception | None = None
        for messages, probe in _forms(self._messages):
            try:
                text, spans = self._render(messages)
                if not probe or str(_PROBE) not in self._render(probe)[0]:
                    return text, spans if self._marks else self._find(messages, text)
            except DataError:
                raise
            except (TemplateError, ValueError, TypeError, KeyError) as error:
                rejected = rejected or error
        reason = first_line(rejected) if rejected else "it does not write the arguments of tool calls as JSON"
        raise DataError(f"{self._where}: the chat template rejects the conversation: {reason}") from rejected

    def _render(self, messages: list[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and the spans that the template marks; with `prompt`, up to where the assistant begins."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template([messages], add_generation_prompt=prompt, **self._options)
        return str(rendered[0][0]), [(start, stop) for start, stop in rendered[1][0]] if self._marks else []

    def _find(self, messages: list[Message], text: str) -> list[Span]:
        """Find the turns in `text`, which is `messages` as the template renders them."""
        marked, pieces = self._mark(messages)
        found, spans = self._align(text, self._render(marked)[0], pieces), list[Span]()
        for number in dict.fromkeys(piece.message for piece in pieces):
            own = [index for index, piece in enumerate(pieces) if piece.message == number]
            for what in (pieces[index].what for index in own if index not in found):
                if what != "reasoning" or number == len(messages) - 1:  # that of earlier turns may be dropped
                    raise self._refusal(f"the template drops the assistant's {what}")
            shown = sorted((index for index in own if index in found), key=lambda index: found[index].start)
            (start, _, before, _), (_, stop, _, behind) = found[shown[0]], found[shown[-1]]
            begins, ends = pieces[shown[0]], pieces[shown[-1]].what
            if start == stop and begins.words:
                continue  # white space that the template strips
            if (begins.what, ends) != ("text", "text"):
                lead, tail = self._around(messages[:number], marked[number], begins.what)
                tail = tail if ends == "tool call" else ""
                if not (before.endswith(lead) and behind.startswith(tail)):
                    raise self._refusal("the template writes a turn in another way if others follow")
                start, stop, behind = start - len(lead), stop + len(tail), behind[len(tail) :]
            is_closed = ends == "tool call" and text.endswith(self._ends, start, stop)
            spans.append((start, stop if is_closed else stop + _end_length(behind, self._ends)))
        return spans

    def _mark(self, messages: list[Message]) -> tuple[list[Message], list[_Piece]]:
        """Return the messages with marks, which are numbers of pieces, instead of the texts of the assistant."""
        marked, pieces = list[Message](), list[_Piece]()

        def mark(what: str, words: str) -> str:
            pieces.append(_Piece(len(marked), what, words))
            return f"\ue000{len(pieces) - 1}\ue001"

        for message in messages:
            content, calls, new = message.get("content"), message.get("tool_calls", []), dict(message)
            if message["role"] == "assistant":
                if not isinstance(content, str) and (content is not None or not calls):
                    raise self._refusal("the assistant's content is not text")
                if "reasoning_content" in message:
                    new["reasoning_content"] = mark("reasoning", message["reasoning_content"])
                thought = ""
                if thinks := _THINKS.fullmatch(content or ""):
                    thought, content = thinks[1] + mark("reasoning", thinks[2]) + thinks[3], thinks[4]
                if content is not None:
                    new["content"] = thought + (mark("text", content) if content.strip() or not calls else content)
                for number, call in enumerate(calls):
                    function = call["function"] | {"name": mark("tool call", call["function"]["name"])}
                    new["tool_calls"] = [
                        *new["tool_calls"][:number],
                        call | {"function": function},
                        *calls[number + 1 :],
                    ]
            marked.append(new)
        return marked, pieces

    def _align(self, text: str, outline: str, pieces: list[_Piece]) -> dict[int, _Found]:
        """Return where each piece that the template shows is in `text`, by the text with marks in `outline`."""
        if "\ue000" in text:
            raise self._refusal("the conversation contains the private character \\ue000")
        parts, found = _MARK.split(outline), dict[int, _Found]()
        at = self._expect(text, parts[0], 0)
        for before, number, behind in zip(parts[::2], map(int, parts[1::2]), parts[2::2], strict=False):
            words = pieces[number].words  # the template may strip them, and add white space
            ways = [strip(words, of) for of in ("", None, "\n") for strip in (str.strip, str.lstrip, str.rstrip)]
            start, way = at, next((way for way in ways if text.startswith(way + behind, at)), words.strip())
            at = self._expect(text, way, at)
            found.setdefault(number, _Found(start, at, before, behind))  # a result may name its tool again
            at = self._expect(text, behind, at)
        if at != len(text):
            raise self._refusal("the template's own text depends on the assistant's messages")
        return found

    def _around(self, earlier: list[Message], marked: Message, begins: str) -> tuple[str, str]:
        """Return what belongs to a turn before its first mark and behind its last one."""
        if begins == "tool call":  # the template may show reasoning in the last turn only
            kept = {name: value for name, value in marked.items() if name != "reasoning_content"}
            marked = kept | ({"content": ""} if kept.get("content") is not None else {})
        whole, known = self._render([*earlier, marked])[0], self._render(earlier)[0] if earlier else ""
        text: Message = {"role": "assistant", "content": "\ue000"}
        other = self._render(earlier, prompt=True)[0] if begins == "reasoning" else self._render([*earlier, text])[0]
        header, marks = _shared(whole, other), list(_MARK.finditer(whole))
        if not header.startswith(_shared(known, other).rstrip()):
            raise self._refusal("the template changes earlier turns with a tool call or reasoning")
        lead = whole[len(header) : marks[0].start()] if begins != "text" else ""
        return lead, whole[marks[-1].end() :].rstrip()

    def _expect(self, text: str, piece: str, at: int) -> int:
        if not text.startswith(piece, at):
            raise self._refusal("the template changes the assistant's messages, or its own text depends on them")
        return at + len(piece)

    def _refusal(self, reason: str) -> DataError:
        return DataError(
            f"{self._where}: the assistant's tokens cannot be identified: {reason}. Set data.chat_template to a chat "
            f"template that marks them with {{% generation %}}."
        )


def _forms(messages: list[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """Yield the messages as templates want tool calls: arguments as mappings or as text, content left out or null.

    With calls, each form has a probe, which shows whether the template writes a mapping as Python does.
    """
    has_calls = any("tool_calls" in message for message in messages)
    for change in (dict, partial(json.dumps, ensure_ascii=False)):
        for absent in ({}, {"content": None}):
            form, probe = (_with_arguments(messages, one, change) for one in (None, _PROBE))
            yield [absent | message for message in form], [absent | message for message in probe if has_calls]


def _with_arguments(messages: list[Message], value: Any, change: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with changed arguments of tool calls, or with those of `value` if that is given."""
    changed = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": change(value or call["function"]["arguments"])}}
            for call in message.get("tool_calls", [])
        ]
        changed.append(message | ({"tool_calls": calls} if calls else {}))
    return changed


def _shared(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def end_marks(tokenizer: Tokenizer) -> tuple[str, ...]:
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


def inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it overlaps one of `spans`; both are in order."""
    marked, number = [], 0
    for start, end in offsets:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        marked.append(number < len(spans) and start < spans[number][1] and end > spans[number][0])
    return marked
