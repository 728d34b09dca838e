"""Locates the assistant's turns in a conversation rendered by a chat template.

A template may mark the turns with {% generation %}, but most do not. Then the conversation is rendered twice:
unchanged, and with a marker in place of each assistant text (reasoning, content and the names of tool calls). The text
between the markers comes from the template, and must surround the assistant texts in the first rendering; otherwise the
row is an error.

A tool call begins where the conversation up to it differs from one in which the assistant writes text instead, and ends
where that conversation ends. Reasoning begins where the generation prompt ends.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from fsdp_shard.data.kinds.conversation import Conversation, Message, is_empty
from fsdp_shard.data.kinds.kind import Tokenizer
from fsdp_shard.errors import DataError
from fsdp_shard.models import tokenizer_files
from fsdp_shard.utils import first_line, format_count, num_common

Span = tuple[int, int]
T = TypeVar("T")

_AN_END = re.compile(r"end|eot|eom|eos|</|sep|return", re.IGNORECASE)
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MARK = re.compile("\ue000([0-9]+)\ue001")
# Arguments that show whether a template formats a mapping as Python instead of JSON.
_PROBE = {"probe of the arguments": 1}
# Forms of tool calls that templates expect: arguments as mappings or as JSON text, content omitted or null.
_FORMS: list[tuple[Callable[[Any], Any], Message]] = [
    (write, absent) for write in (dict, partial(json.dumps, ensure_ascii=False)) for absent in ({}, {"content": None})
]
_THINKS = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)


@dataclass
class _Piece:
    """An assistant text in a message (reasoning, content or the name of a tool), and its position in the rendering."""

    message: int
    what: str
    words: str
    start: int = -1
    stop: int = -1


class Renderer:
    """Applies a tokenizer's chat template to one conversation; `ends` are the tokens that end a turn."""

    def __init__(self, tokenizer: Tokenizer, conversation: Conversation, ends: tuple[str, ...] = ()) -> None:
        self._conversation, self._ends = conversation, ends
        self._messages, self._where = conversation.messages, conversation.where
        self._template = f"the chat template of {tokenizer_files(tokenizer)}"
        template = str(tokenizer.get_chat_template(tools=conversation.tools))
        self._marks = _GENERATION.search(template) is not None
        self._options: dict[str, Any] = {"chat_template": template, "tools": conversation.tools}
        self._options |= {"return_assistant_tokens_mask": self._marks, **tokenizer.special_tokens_map}
        if conversation.tools and not re.search(r"\btools\b", template):
            raise DataError(
                f"{self._where} has definitions of tools, which the chat template does not use. Set data.chat_template "
                f"(in generate: chat_template) to one that does, or remove the column 'tools'."
            )

    def render(self) -> tuple[str, list[Span]]:
        """Return the text and the spans of the trained assistant turns, each including the token that ends it.

        Raises:
            DataError: The template rejects the conversation, or the spans cannot be identified.
        """

        def with_spans(messages: list[Message], text: str, spans: list[Span]) -> tuple[str, list[Span]]:
            return text, self._trained(spans) if self._marks else self._find(messages, text)

        return self._accepted(with_spans)

    def render_prompt(self, *, begins_turn: bool = True) -> str:
        """Return the text; with `begins_turn`, up to the beginning of the assistant's next turn.

        Raises:
            DataError: The template rejects the conversation.
        """
        return self._accepted(lambda messages, text, spans: text, prompt=begins_turn)

    def _accepted(self, finish: Callable[[list[Message], str, list[Span]], T], *, prompt: bool = False) -> T:
        """Return the result of `finish` for the first form of messages that the template accepts, and for its text."""
        rejected: Exception | None = None
        for form in _FORMS:
            messages, probe = (_form(self._messages, *form, value) for value in (None, _PROBE))
            try:
                text, spans = self._render(messages, prompt=prompt)
                if probe == messages or str(_PROBE) not in self._render(probe, prompt=prompt)[0]:
                    return finish(messages, text, spans)
            except DataError:
                raise
            except Exception as error:  # a template is a program
                rejected = rejected or error
        raise self._rejection(rejected) from rejected

    def _rejection(self, error: Exception | None) -> DataError:
        reason = first_line(error) if error else "it does not write the arguments of tool calls as JSON"
        return DataError(f"{self._where}: {self._template} rejects the conversation: {reason}")

    def _render(self, messages: list[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and the spans that the template marks; with `prompt`, up to the assistant's turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template([messages], add_generation_prompt=prompt, **self._options)
        return str(rendered[0][0]), [(start, stop) for start, stop in rendered[1][0]] if self._marks else []

    def _trained(self, spans: list[Span]) -> list[Span]:
        """Return the spans of trained turns, out of the spans that the template marks, one for each turn."""
        turns = [number for number, message in enumerate(self._messages) if message["role"] == "assistant"]
        trained = set(self._conversation.trained_messages)
        # A template may omit turns without text, or turns that are not trained.
        shown = [number for number in turns if not is_empty(self._messages[number])]
        for numbers in (turns, shown, trained):
            if len(numbers) == len(spans):
                return [span for number, span in zip(sorted(numbers), spans, strict=True) if number in trained]
        if not self._conversation.excluded:
            return spans
        raise DataError(
            f"{self._where} has messages that are marked as not to be trained, and {self._template} marks "
            f"{format_count(len(spans), 'part')} of {format_count(len(turns), 'message')} of the assistant, which does "
            f"not show whose they are. Set data.chat_template to one that marks each message once."
        )

    def _find(self, messages: list[Message], text: str) -> list[Span]:
        """Find the turns in `text`, the template's rendering of `messages`."""
        marked, pieces = self._mark(messages)
        self._align(text, self._render(marked)[0], pieces)
        found, trained = [], set(self._conversation.trained_messages)
        for number, own in groupby(pieces, attrgetter("message")):
            if number not in trained:
                continue
            turn = list(own)
            for piece in turn:  # reasoning of earlier turns may be dropped
                if piece.start < 0 and (piece.what != "reasoning" or number == len(messages) - 1):
                    raise self._refusal(f"the template drops the assistant's {piece.what}")
            shown = sorted((piece for piece in turn if piece.start >= 0), key=attrgetter("start"))
            lead, tail = self._around(messages[:number], marked[number], shown[0].what, shown[-1].what)
            found.append(self._turn(text, shown[0].start, shown[-1].stop, lead, tail))
        return found

    def _turn(self, text: str, start: int, stop: int, lead: str, tail: str) -> Span:
        """Return the span of a turn, including `lead` before its first piece at `start` and `tail` after its last."""
        if not (text.endswith(lead, 0, start) and text.startswith(tail, stop)):
            raise self._refusal("the template writes a turn in another way if others follow")
        stop += len(tail)
        if tail.endswith(self._ends):
            return start - len(lead), stop
        blank = len(text) - len(text[stop:].lstrip())
        return start - len(lead), next((blank + len(end) for end in self._ends if text.startswith(end, blank)), stop)

    def _mark(self, messages: list[Message]) -> tuple[list[Message], list[_Piece]]:
        """Return the messages with marks, which hold piece numbers, in place of the assistant's texts."""
        marked, pieces = list[Message](), list[_Piece]()

        def mark(what: str, words: str) -> str:
            pieces.append(_Piece(len(marked), what, words))
            return f"\ue000{len(pieces) - 1}\ue001"

        def marks(message: Message) -> Iterator[tuple[str, Any]]:
            content, calls = message.get("content"), message.get("tool_calls")
            if not isinstance(content, str) and (content is not None or not calls):
                raise self._refusal("the assistant's content is not text")
            if "reasoning_content" in message:
                yield "reasoning_content", mark("reasoning", message["reasoning_content"])
            if content is not None:
                thought, content = "", content
                if thinks := _THINKS.fullmatch(content):
                    thought, content = thinks[1] + mark("reasoning", thinks[2]) + thinks[3], thinks[4]
                yield "content", thought + (mark("text", content) if content.strip() or not calls else content)
            if calls:
                yield (
                    "tool_calls",
                    _with_changed_functions(calls, lambda function: {"name": mark("tool call", function["name"])}),
                )

        for message in messages:
            marked.append(message | dict(marks(message) if message["role"] == "assistant" else ()))
        return marked, pieces

    def _align(self, text: str, outline: str, pieces: list[_Piece]) -> None:
        """Set the position in `text` of each piece that the template shows, using the marked text `outline`."""
        if "\ue000" in text:
            raise self._refusal("the conversation contains the private character \\ue000")
        written, *parts = _MARK.split(outline)
        for number, behind in zip(parts[::2], parts[1::2], strict=True):
            piece, at = pieces[int(number)], len(written)  # the template may strip or add white space
            ways = [strip(piece.words, of) for of in ("", None, "\n") for strip in (str.strip, str.lstrip, str.rstrip)]
            way = next((way for way in ways if text.startswith(way + behind, at)), piece.words)
            if piece.start < 0:  # a tool result may repeat the tool's name
                piece.start, piece.stop = at, at + len(way)
            written += way + behind
        if written != text:
            raise self._refusal("the template changes the assistant's messages, or its own text depends on them")

    def _around(self, earlier: list[Message], turn: Message, first: str, last: str) -> tuple[str, str]:
        """Return the parts of a turn before its first piece and after its last one, if those are not content."""
        if (first, last) == ("text", "text"):
            return "", ""
        if first == "tool call":  # the template may show reasoning only in the last turn
            kept = {name: value for name, value in turn.items() if name != "reasoning_content"}
            turn = kept | ({"content": ""} if kept.get("content") is not None else {})
        said: Message = {"role": "assistant", "content": "\ue000"}
        other = self._render(earlier, prompt=True) if first == "reasoning" else self._render([*earlier, said])
        whole, known = self._render([*earlier, turn])[0], self._render(earlier)[0] if earlier else ""
        header, marks = whole[: num_common(whole, other[0])], list(_MARK.finditer(whole))
        if not header.startswith(known[: num_common(known, other[0])].rstrip()):
            raise self._refusal("the template changes earlier turns with a tool call or reasoning")
        lead = whole[len(header) : marks[0].start()] if first != "text" else ""
        return lead, whole[marks[-1].end() :].rstrip() if last == "tool call" else ""

    def _refusal(self, reason: str) -> DataError:
        return DataError(
            f"{self._where}: {self._template} does not show which tokens are the assistant's: {reason}. "
            f"Set data.chat_template to a chat template that marks them with {{% generation %}}."
        )


def _with_changed_functions(calls: list[Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Any]:
    """Return tool calls with each function replaced by the result of `change`."""
    return [call | {"function": call["function"] | change(call["function"])} for call in calls]


def _form(messages: list[Message], write: Callable[[Any], Any], absent: Message, value: Any = None) -> list[Message]:
    """Return the messages merged into `absent`, with `write` applied to the arguments of calls, or to `value`."""
    changed = []
    for message in messages:
        calls = _with_changed_functions(
            message.get("tool_calls", []), lambda call: {"arguments": write(value or call["arguments"])}
        )
        changed.append(absent | message | ({"tool_calls": calls} if calls else {}))
    return changed


def end_marks(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the tokens that end a turn, longest first: end-of-text, and added tokens with a name such as <|im_end|>.

    Other added tokens are excluded: without an end token, a turn is followed by the token that begins the next turn.
    """
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    ends = {text for text in added if _AN_END.search(text)} | {str(tokenizer.eos_token or "")}
    return tuple(sorted(ends - {""}, key=lambda text: (-len(text), text)))


def inside(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return whether each token overlaps one of `spans`; both are in order."""
    marked, number = [], 0
    for start, end in offsets:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        marked.append(number < len(spans) and start < spans[number][1] and end > spans[number][0])
    return marked


def ends_turns(examples: Iterable[tuple[Iterable[int], Iterable[int]]], tokenizer: Tokenizer) -> bool:
    """Return whether any run of predicted tokens ends with an end-of-turn token, or with white space after one.

    True if none are predicted.

    Args:
        examples: Token ids, and whether each is predicted.
        tokenizer: The tokenizer of the examples; its special tokens also end turns.
    """
    ends = tuple({end.rstrip() for end in (*end_marks(tokenizer), *tokenizer.all_special_tokens)})
    is_any = False
    for ids, predicted in examples:
        for is_predicted, run in groupby(zip(ids, predicted, strict=True), lambda pair: bool(pair[1])):
            is_any = is_any or is_predicted
            if is_predicted and str(tokenizer.decode([int(token) for token, _ in run])).rstrip().endswith(ends):
                return True
    return not is_any
