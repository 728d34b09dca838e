"""Rows that compare answers, in the formats of TRL's datasets, as answers that are chosen and others that are rejected.

A row has a pair (`chosen`, `rejected`), one answer with a label (`completion`), or a ranked list (`completions`).
Prompt and answers are texts or lists of messages. Without a prompt, a pair has the common beginning of both as its
prompt, by the rules of TRL's `extract_prompt`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fsdp_shard.data.kinds.conversation import Conversation, Message, decoded, read_conversation
from fsdp_shard.data.sources.row import Row, require_columns
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from fsdp_shard.data.kinds.preference import PreferenceKind

# What an answer is.
CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE = "chosen", "rejected", "desirable", "undesirable"

# Why something is left out: what it is, and the reason, for people.
EQUAL, EMPTY, EMPTY_ANSWER, TIED, SINGLE = "equal", "empty", "empty answer", "tied", "single"
UNLABELED, UNSCORED = "unlabeled", "unscored"
LEFT_OUT = {
    EQUAL: ("pair", " with equal answers"),
    EMPTY: ("pair", " with an empty answer"),
    TIED: ("pair", " with equal ranks"),
    SINGLE: ("row", " with fewer than two answers"),
    EMPTY_ANSWER: ("empty answer", ""),
    UNLABELED: ("answer", " without a label"),
    UNSCORED: ("answer", " without a rank or score"),
}

Given: TypeAlias = "str | list[Message]"


class Answer(NamedTuple):
    """An answer: what it is, its prompt, and its text or, of a conversation, the prompt's messages and its own."""

    label: str
    prompt: str | Conversation
    whole: str | Conversation


class Compared(NamedTuple):
    """The answers of a row, each rejected one after the chosen one that is better; why others are left out; and the
    margin between them, None without one.
    """

    answers: list[Answer]
    left_out: list[str]
    margin: float | None


def read_compared(row: Row, kind: PreferenceKind) -> Compared:
    """Read a row of one of the formats; raise DataError if a column is missing or holds something else."""
    readers = {kind.completions: _ranked, kind.chosen: _pair, kind.rejected: _pair, kind.completion: _single}
    present = [name for name in readers if name in row.values]
    require_columns(row, {f"data.{field}_column": getattr(kind, field) for field in kind.given})
    if not present:
        others = f", or data.completion_column or data.completions_column if it has no pairs of {kind.chosen_by}"
        require_columns(row, {f"data.{name}_column": getattr(kind, name) for name in ("chosen", "rejected")}, others)
    name = next((name for name in present if row.values[name] is not None), present[0])
    try:
        answers, left_out = readers[name](row, kind)
    except RecursionError as error:
        raise DataError(f"{row.where} has lists or mappings in too many levels; correct or remove it.") from error
    margin = None if kind.margin is None else _number(row.values.get(kind.margin), row, kind.margin, "margin")
    return Compared(answers, left_out, margin)


def _pair(row: Row, kind: PreferenceKind) -> tuple[list[Answer], list[str]]:
    _require(row, kind, "chosen", "rejected")
    chosen, rejected = (_given(row, getattr(kind, field), field) for field in ("chosen", "rejected"))
    prompt = _given(row, kind.prompt, "prompt") if kind.prompt in row.values else None
    if not (chosen and rejected):
        return [], [EMPTY]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{row.where}: of {kind.chosen!r} and {kind.rejected!r}, one is text and the other a list of messages; "
            f"make both the same."
        )
    # A prompt that is text may repeat the question of conversations.
    repeats = isinstance(prompt, str) and isinstance(chosen, list) and not _answers(chosen)
    if prompt is None or repeats or (not prompt and isinstance(chosen, list)):
        prompt, chosen, rejected = _extract(chosen, rejected)
    found = [_answer(row, kind, *one) for one in ((CHOSEN, prompt, chosen), (REJECTED, prompt, rejected))]
    answers = [one for one in found if one is not None]
    return (answers, []) if len(answers) == len(found) else ([], [EMPTY])


def _single(row: Row, kind: PreferenceKind) -> tuple[list[Answer], list[str]]:
    _require(row, kind, "prompt", "completion", "desirable")
    value = row.values[kind.desirable]
    if isinstance(value, str):  # CSV files have it as text
        value = {"true": True, "1": True, "false": False, "0": False, "": None}.get(value.strip().lower(), value)
    if value is None:
        return [], [UNLABELED]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise DataError(
            f"{row.where}: column {kind.desirable!r} holds {str(value)[:80]!r}, expected true or false, or 1 or 0. Set "
            f"data.desirable_column."
        )
    prompt, completion = (_given(row, getattr(kind, field), field) for field in ("prompt", "completion"))
    answer = _answer(row, kind, DESIRABLE if value else UNDESIRABLE, prompt, completion)
    return ([], [EMPTY_ANSWER]) if answer is None else ([answer], [])


def _ranked(row: Row, kind: PreferenceKind) -> tuple[list[Answer], list[str]]:
    """Return the best answer, and each other one that is worse: a pair with each of them."""
    _require(row, kind, "prompt", "completions")
    listed = decoded(row.values[kind.completions])
    if listed is None:
        return [], [SINGLE]
    if not isinstance(listed, list):
        raise DataError(
            f"{row.where}: column {kind.completions!r} holds {type(listed).__name__}, expected a list of answers. Set "
            f"data.completions_column."
        )
    prompt, orders = _given(row, kind.prompt, "prompt"), _orders(row, kind, len(listed))
    found, left_out = list[tuple[float, Answer]](), list[str]()
    for value, order in zip(listed, orders, strict=True):
        answer = _answer(row, kind, REJECTED, prompt, _as_given(value, row, kind.completions, "completions"))
        if answer is None or order is None:
            left_out.append(EMPTY_ANSWER if answer is None else UNSCORED)
        else:
            found.append((order, answer))
    if len(found) < 2:
        return [], [*left_out, SINGLE]
    least, best = min(found, key=lambda one: one[0])  # the first of several
    others = [(order, answer) for order, answer in found if answer is not best]
    worse = [answer for order, answer in others if order > least]
    left_out += [TIED] * (len(others) - len(worse))
    return ([best._replace(label=CHOSEN), *worse] if worse else []), left_out


def _orders(row: Row, kind: PreferenceKind, count: int) -> list[float | None]:
    """Return a number for each answer, smaller for a better one, None without; by ranks, scores or position."""
    for field, sign in (("ranks", 1), ("scores", -1)):
        column = getattr(kind, field)
        values = decoded(row.values.get(column))
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise DataError(
                f"{row.where}: column {column!r} holds {found}, expected a list of {count} numbers, one for each "
                f"answer of {kind.completions!r}. Set data.{field}_column."
            )
        numbers = [None if one is None else _number(one, row, column, field) for one in values]
        return [None if number is None else sign * number for number in numbers]
    return [float(number) for number in range(count)]


def _answer(row: Row, kind: PreferenceKind, label: str, prompt: Given, completion: Given) -> Answer | None:
    """Return an answer; None for an empty one. A prompt or answer that is text joins the other's messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        system = row.values.get("system")
        if isinstance(system, str) and system.strip():
            raise DataError(
                f"{row.where} has a system message in the column 'system', which only conversations have; give the "
                f"prompt as a list of messages, or rename the column."
            )
        return Answer(label, prompt, completion) if completion.strip() else None
    if isinstance(prompt, str):
        if not _answers(completion) and completion and prompt:
            raise DataError(
                f"{row.where}: the prompt is text, and the answer a conversation that does not begin with the "
                f"assistant; give the prompt as a list of messages, and in the answer its own messages alone."
            )
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}] if completion.strip() else []
    if not completion:
        return None
    column = kind.prompt if kind.prompt in row.values else kind.chosen
    along = {name: row.values[name] for name in ("system", "tools") if name in row.values and name != column}
    whole = read_conversation(Row(row.where, {column: [*prompt, *completion], **along}), column, kind.roles)
    own = whole.messages[-len(completion) :]
    if not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in own):
        return None
    return Answer(label, whole._replace(messages=whole.messages[: -len(completion)]), whole)


def _answers(completion: Given) -> bool:
    """Return whether messages begin with an answer, instead of a question."""
    first = completion[0] if completion else {}
    role = first.get("role", first.get("from")) if isinstance(first, Mapping) else None
    return role not in ("system", "developer", "user", "human", "prompter")


def _extract(chosen: Given, rejected: Given) -> tuple[Given, Given, Given]:
    """Return the common beginning of two answers, and what is left of each: as TRL does, always something.

    A space between prompt and answers belongs to the answers.
    """
    same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
    end = min(same, len(chosen) - 1, len(rejected) - 1)
    if same == end and end > 0 and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def _given(row: Row, column: str, field: str) -> Given:
    return _as_given(row.values[column], row, column, field)


def _as_given(value: Any, row: Row, column: str, field: str) -> Given:
    """Return a text or a list of messages, which may be JSON text; null is the empty text."""
    listed = decoded(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    is_list = isinstance(listed, list) and all(isinstance(message, Mapping) for message in listed)
    if is_list and not (isinstance(value, str) and not (listed and {"role", "from"} & listed[0].keys())):
        return list(listed)
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(
        f"{row.where}: column {column!r} holds {type(value).__name__}, expected text or a list of messages. Set "
        f"data.{field}_column."
    )


def _require(row: Row, kind: PreferenceKind, *names: str) -> None:
    require_columns(row, {f"data.{field}_column": getattr(kind, field) for field in names})
    # A header may name columns that a row does not have.
    require_columns(row._replace(header=None), {f"data.{field}_column": getattr(kind, field) for field in names})


def _number(value: Any, row: Row, column: str, field: str) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise DataError(
            f"{row.where}: column {column!r} holds {str(value)[:80]!r}, expected a number. Set data.{field}_column."
        )
    return number
