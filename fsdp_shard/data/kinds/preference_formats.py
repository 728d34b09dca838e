"""Reads rows that compare answers, in the formats of TRL's datasets, as chosen and rejected answers.

A row has a pair (`chosen`, `rejected`), one labeled answer (`completion`), or a ranked list (`completions`). Prompt and
answers are texts or lists of messages. In a pair without a prompt, the common beginning of both answers is the prompt,
as in TRL's `extract_prompt`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fsdp_shard.data.kinds.conversation import Conversation, Message, decode_json, is_empty, read_conversation
from fsdp_shard.data.sources.row import Row, require_columns
from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_count, num_common

_LARGEST = 3.4e38  # float32 number
# Roles of an answer.
CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE = "chosen", "rejected", "desirable", "undesirable"

# Reasons for skipping: the kind of item and the reason, to print.
EQUAL, EMPTY, EMPTY_ANSWER, TIED, SINGLE = "equal", "empty", "empty answer", "tied", "single"
UNLABELED, UNSCORED = "unlabeled", "unscored"
SKIP_REASONS = {
    EQUAL: ("pair", " with equal answers"),
    EMPTY: ("pair", " with an empty answer"),
    TIED: ("pair", " with equal ranks"),
    SINGLE: ("row", " with fewer than two answers"),
    EMPTY_ANSWER: ("empty answer", ""),
    UNLABELED: ("answer", " without a label"),
    UNSCORED: ("answer", " without a rank or score"),
}

Given: TypeAlias = "str | list[Message]"


@dataclass(frozen=True)
class PreferenceColumns:
    """The columns of the rows.

    `given` holds the columns that the user named, which every row needs. `roles` maps the data's role names to roles.
    """

    prompt: str
    chosen: str
    rejected: str
    completion: str
    completions: str
    desirable: str
    ranks: str
    scores: str
    margin: str | None
    given: tuple[str, ...]
    roles: Mapping[str, str]


class Answer(NamedTuple):
    """An answer: its role, its prompt, and its text or, in a conversation, the messages of prompt and answer."""

    label: str
    prompt: str | Conversation
    whole: str | Conversation


class ComparedAnswers(NamedTuple):
    """The answers of a row, each rejected one after its chosen one; the reasons for skipping others; and the margin
    between the answers, if any.
    """

    answers: list[Answer]
    skip_reasons: list[str]
    margin: float | None


def read_compared(row: Row, columns: PreferenceColumns) -> ComparedAnswers:
    """Read a row in one of the formats; raise DataError if a column is missing or has other content."""
    readers = {
        columns.completions: _ranked,
        columns.chosen: _pair,
        columns.rejected: _pair,
        columns.completion: _single,
    }
    present = [name for name in readers if name in row.values]
    require_columns(row, {f"data.{field}_column": getattr(columns, field) for field in columns.given})
    if not present:
        others = ", or data.completion_column or data.completions_column if it has no pairs"
        require_columns(row, {f"data.{name}_column": getattr(columns, name) for name in ("chosen", "rejected")}, others)
    name = next((name for name in present if row.values[name] is not None), present[0])
    try:
        answers, skip_reasons = readers[name](row, columns)
        value = None if columns.margin is None else row.values.get(columns.margin)
        margin = None if columns.margin is None else _number(value, row, columns.margin, "margin")
    except RecursionError as error:
        raise DataError(f"{row.where} has lists or mappings in too many levels; correct or remove it.") from error
    return ComparedAnswers(answers, skip_reasons, margin)


def refuse_labeled(where: str, number: int) -> None:
    """Raise DataError if `number` answers have a label although pairs are required."""
    if number:
        raise DataError(
            f"{where}: {format_count(number, 'answer')} of the data {'has' if number == 1 else 'have'} a label, and "
            f"pairs of a chosen and a rejected answer are compared here. Give such pairs, or choose an objective "
            f"for labeled answers, such as objective=kto."
        )


def _pair(row: Row, columns: PreferenceColumns) -> tuple[list[Answer], list[str]]:
    _require(row, columns, "chosen", "rejected")
    chosen, rejected = (_given(row, getattr(columns, field), field) for field in ("chosen", "rejected"))
    prompt = _given(row, columns.prompt, "prompt") if columns.prompt in row.values else None
    if not (chosen and rejected):
        return [], [EMPTY]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{row.where}: of {columns.chosen!r} and {columns.rejected!r}, one is text and the other a list of "
            f"messages; make both the same."
        )
    # A text prompt may repeat the question of the conversations.
    repeats = isinstance(prompt, str) and _asks(chosen, columns)
    if prompt is None or repeats or (not prompt and isinstance(chosen, list)):
        prompt, chosen, rejected = _extract(chosen, rejected)
    else:
        _refuse_questions(row, columns, chosen, rejected)
    found = [_answer(row, columns, *one) for one in ((CHOSEN, prompt, chosen), (REJECTED, prompt, rejected))]
    answers = [one for one in found if one is not None]
    return (answers, []) if len(answers) == len(found) else ([], [EMPTY])


def _single(row: Row, columns: PreferenceColumns) -> tuple[list[Answer], list[str]]:
    _require(row, columns, "prompt", "completion", "desirable")
    value = row.values[columns.desirable]
    if isinstance(value, str):  # CSV files store it as text
        value = {"true": True, "1": True, "false": False, "0": False, "": None}.get(value.strip().lower(), value)
    if value is None:
        return [], [UNLABELED]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise DataError(
            f"{row.where}: column {columns.desirable!r} holds {str(value)[:80]!r}, expected true or false, or 1 or 0. "
            f"Set data.desirable_column."
        )
    prompt, completion = (_given(row, getattr(columns, field), field) for field in ("prompt", "completion"))
    _refuse_questions(row, columns, completion)
    answer = _answer(row, columns, DESIRABLE if value else UNDESIRABLE, prompt, completion)
    return ([], [EMPTY_ANSWER]) if answer is None else ([answer], [])


def _ranked(row: Row, columns: PreferenceColumns) -> tuple[list[Answer], list[str]]:
    """Return the best answer and each worse one, which forms a pair with it."""
    _require(row, columns, "prompt", "completions")
    listed = decode_json(row.values[columns.completions])
    if listed is None:
        return [], [SINGLE]
    if not isinstance(listed, list):
        raise DataError(
            f"{row.where}: column {columns.completions!r} holds {type(listed).__name__}, expected a list of answers. "
            f"Set data.completions_column."
        )
    prompt, orders = _given(row, columns.prompt, "prompt"), _orders(row, columns, len(listed))
    completions = [_as_given(value, row, columns.completions, "completions") for value in listed]
    _refuse_questions(row, columns, *completions)
    found, skip_reasons = list[tuple[float, Answer]](), list[str]()
    for completion, order in zip(completions, orders, strict=True):
        answer = _answer(row, columns, REJECTED, prompt, completion)
        if answer is None or order is None:
            skip_reasons.append(EMPTY_ANSWER if answer is None else UNSCORED)
        else:
            found.append((order, answer))
    if len(found) < 2:
        return [], [*skip_reasons, SINGLE]
    least, best = min(found, key=lambda one: one[0])  # the first of several
    others = [(order, answer) for order, answer in found if answer is not best]
    worse = [answer for order, answer in others if order > least]
    skip_reasons += [TIED] * (len(others) - len(worse))
    return ([best._replace(label=CHOSEN), *worse] if worse else []), skip_reasons


def _orders(row: Row, columns: PreferenceColumns, count: int) -> list[float | None]:
    """Return a number for each answer, smaller for better ones, from ranks, scores or position; None if unranked."""
    for field, sign in (("ranks", 1), ("scores", -1)):
        column = getattr(columns, field)
        values = decode_json(row.values.get(column))
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise DataError(
                f"{row.where}: column {column!r} holds {found}, expected a list of {count} numbers, one for each "
                f"answer of {columns.completions!r}. Set data.{field}_column."
            )
        numbers = [None if one is None else _number(one, row, column, field) for one in values]
        return [None if number is None else sign * number for number in numbers]
    return [float(number) for number in range(count)]


def _answer(row: Row, columns: PreferenceColumns, label: str, prompt: Given, completion: Given) -> Answer | None:
    """Return an answer, None if empty. If only one of prompt and answer is text, it becomes a message of the other."""
    if isinstance(prompt, str) and isinstance(completion, str):
        system = row.values.get("system")
        if isinstance(system, str) and system.strip():
            raise DataError(
                f"{row.where} has a system message in the column 'system', which only conversations have; give the "
                f"prompt as a list of messages, or rename the column."
            )
        return Answer(label, prompt, completion) if completion.strip() else None
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}] if completion.strip() else []
    if not completion:
        return None
    column = columns.prompt if columns.prompt in row.values else columns.chosen
    along: dict[str, Any] = {
        name: row.values[name] for name in ("system", "tools") if name in row.values and name != column
    }
    whole = read_conversation(Row(row.where, {column: [*prompt, *completion], **along}), column, columns.roles)
    first = len(whole.messages) - len(completion)
    if any(number >= first for number in whole.excluded):
        raise DataError(
            f"{row.where}: a message of an answer is marked as not to be trained (by weight, train, training or loss), "
            f"but answers are compared as a whole. Remove the mark, or the row."
        )
    if all(map(is_empty, whole.messages[first:])):
        return None
    return Answer(label, whole._replace(messages=whole.messages[:first]), whole)


def _asks(completion: Given, columns: PreferenceColumns) -> bool:
    """Return whether messages begin with a question rather than an answer."""
    first = completion[0] if isinstance(completion, list) and completion else {}
    role = first.get("role", first.get("from"))
    return isinstance(role, str) and columns.roles.get(role, role) in ("system", "developer", "user", "human")


def _refuse_questions(row: Row, columns: PreferenceColumns, *completions: Given) -> None:
    """Raise DataError if an answer repeats the prompt."""
    if any(_asks(completion, columns) for completion in completions):
        raise DataError(
            f"{row.where}: an answer begins with a message that is not the assistant's; with the prompt in "
            f"{columns.prompt!r}, give in answers only the messages after it."
        )


def _extract(chosen: Given, rejected: Given) -> tuple[Given, Given, Given]:
    """Return the common beginning of two answers and the rest of each, which is never empty, as in TRL.

    A space between prompt and answers belongs to the answers.
    """
    same = num_common(chosen, rejected)
    end = min(same, len(chosen) - 1, len(rejected) - 1)
    if same == end and end > 0 and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def _given(row: Row, column: str, field: str) -> Given:
    return _as_given(row.values[column], row, column, field)


def _as_given(value: Any, row: Row, column: str, field: str) -> Given:
    """Return a text or a list of messages, parsed from JSON text if needed; null becomes the empty text."""
    listed = decode_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if isinstance(listed, list) and all(isinstance(message, Mapping) for message in listed):
        is_json = isinstance(value, str)
        if not is_json or (listed and {"role", "from"} & listed[0].keys()):  # else text in brackets
            return list(listed)
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(
        f"{row.where}: column {column!r} holds {type(value).__name__}, expected text or a list of messages. Set "
        f"data.{field}_column."
    )


def _require(row: Row, columns: PreferenceColumns, *names: str) -> None:
    require_columns(row, {f"data.{field}_column": getattr(columns, field) for field in names})
    # A header may name columns that a row does not have.
    require_columns(row._replace(header=None), {f"data.{field}_column": getattr(columns, field) for field in names})


def _number(value: Any, row: Row, column: str, field: str) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not abs(number) <= _LARGEST:  # NaN is not either
        raise DataError(
            f"{row.where}: column {column!r} holds {str(value)[:80]!r}, expected a number. Set data.{field}_column."
        )
    return number
