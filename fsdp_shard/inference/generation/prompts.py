"""Prompts from the command line, a file or standard input. Imports no torch; knows no model."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.inference.config import GenerateSettings

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """`place` is what an error calls it: the setting, or the file and line."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One row of the output file; `num_new_tokens` counts the end-of-text token if the model gave one."""

    prompt: str
    completion: str
    num_new_tokens: int
    log_probabilities: list[float] | None = None


def check_standard_input(settings: GenerateSettings, *, is_shared: bool) -> None:
    """Raise ConfigError where prompts are to come from standard input, and several processes would read it."""
    for name in ("prompt", "prompts"):
        if getattr(settings, name) == "-" and is_shared:
            raise ConfigError(
                f"{name}=- can be read by one process only, and here each rank is one that begins anew; write the "
                f"prompts to a file and give prompts=FILE."
            )


def read_prompts(settings: GenerateSettings) -> list[Prompt]:
    """The prompts that `settings` name, in order. Raises DataError naming the line that is wrong."""
    if settings.prompt == "-":
        return [_checked(_standard_input("prompt"), "standard input")]
    if settings.prompt is not None:
        return [Prompt(settings.prompt, "prompt")]
    assert settings.prompts is not None, "settings.check has seen to that"
    if settings.prompts == "-":
        prompts = list(_from_text(_numbered("standard input", _standard_input("prompts"))))
    else:
        path = Path(settings.prompts).expanduser()
        reader = {".jsonl": _from_jsonl, ".txt": _from_text}.get(path.suffix.lower())
        if reader is None:
            raise DataError(
                f'prompts={path} must be a .jsonl file with rows {{"prompt": ...}} or a .txt file, one a line.'
            )
        prompts = list(reader(_numbered(str(path), _text_of(path))))
    if not prompts:
        raise DataError(f"prompts={settings.prompts} holds no prompts; give at least one line.")
    return prompts


def describe(completion: Completion, number: int) -> str:
    """Completion `number` (from 0) as a terminal shows it; of many only the first, all are in the output file."""
    if number >= _SHOWN:
        return "\n..." if number == _SHOWN else ""
    return f"\n> {completion.prompt}\n{indent(completion.completion.strip(), '  ')}"


def _from_jsonl(lines: Iterator[tuple[str, str]]) -> Iterator[Prompt]:
    for place, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not JSON: {error.msg} at column {error.colno}.") from error
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{place} is not a row {{"prompt": "some text"}}: it is {line.strip()[:60]}.')
        yield _checked(text, place)


def _from_text(lines: Iterator[tuple[str, str]]) -> Iterator[Prompt]:
    for place, line in lines:
        yield _checked(line.rstrip("\r\n"), place)


def _checked(text: str, place: str) -> Prompt:
    if not text.strip():
        raise DataError(f"{place} is an empty prompt; give some text to go on from, or delete the line.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{place} has half of a surrogate pair (\\ud800 to \\udfff), which is no text.")
    return Prompt(text, place)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"prompts={path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts={path} cannot be read as UTF-8 text: {error}.") from error


@functools.cache  # it can be read once, and is asked for by the check and by the work
def _standard_input(setting: str) -> str:
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{setting}=- cannot be read as UTF-8 text: {error}.") from error


def _numbered(name: str, text: str) -> Iterator[tuple[str, str]]:
    """(place, line) of every line but empty ones at the end."""
    lines = text.split("\n")  # a string in JSON may hold what else Unicode ends lines with
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield f"{name}, line {number},", line
