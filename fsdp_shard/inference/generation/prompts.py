"""Prompts from the command line, a file or standard input, and their completions. Imports no torch."""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any

from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.inference.config import GenerateSettings

_NUM_SHOWN = 10
# Columns that are not read in rows with a prompt, or with messages, and what to do instead.
_NEVER_READ = {"chat_template_kwargs": "set chat_template_kwargs= for all rows"}
_NOT_WITH_PROMPT = _NEVER_READ | dict.fromkeys(("system", "tools"), 'write the prompt as {"messages": [...]}')
_NOT_WITH_MESSAGES = _NEVER_READ | {"documents": "write the documents into the messages"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        text: The text to continue; for a conversation, its last message.
        location: Its source in error messages: the setting, or the file and line.
        adapter: The adapter that answers.
        conversation: The conversation's `messages`, and `tools` and `system` if its row contains them.
    """

    text: str
    location: str
    adapter: str | None = None
    conversation: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One row of the output file; `num_new_tokens` includes a generated end-of-text token.

    `messages` are set if the prompt is a conversation.
    """

    prompt: str
    completion: str
    num_new_tokens: int
    log_probabilities: list[float] | None = None
    adapter: str | None = None
    messages: list[Any] | None = None


def check_standard_input(settings: GenerateSettings, *, is_shared: bool) -> None:
    """Raise ConfigError if prompts come from standard input and several processes would read it."""
    for name in ("prompt", "prompts"):
        if getattr(settings, name) == "-" and is_shared:
            raise ConfigError(
                f"{name}=- can be read by one process only, and here each rank is a process of its own; write the "
                f"prompts to a file and give prompts=FILE."
            )


def read_prompts(settings: GenerateSettings) -> list[Prompt]:
    """Return the prompts in `settings`, in order.

    Raises:
        DataError: A prompt cannot be used, or its file cannot be read; the message names the line.
    """
    found = _read_prompts(settings)
    default, known = settings.default_adapter, settings.adapter_paths
    for prompt in found:
        if prompt.conversation is not None:
            _check_conversation(prompt.conversation, prompt.location, settings)
        if prompt.adapter is not None and prompt.adapter not in known:
            has = f"adapters has {', '.join(known)}" if known else "adapters is not set"
            raise DataError(f"{prompt.location} names the adapter {prompt.adapter!r}, and {has}.")
    return [prompt if prompt.adapter else replace(prompt, adapter=default) for prompt in found]


def _read_prompts(settings: GenerateSettings) -> list[Prompt]:
    if settings.prompt is not None:
        if settings.prompt == "-":
            # `echo` and editors add a final newline, which would prompt the model to begin a new line.
            return [_make_prompt(_read("prompt", "-").removesuffix("\n").removesuffix("\r"), "standard input")]
        return [_make_prompt(settings.prompt, "prompt")]
    assert settings.prompts is not None, "settings.check guarantees one of them"
    is_input, path = settings.prompts == "-", Path(settings.prompts).expanduser()
    if not is_input and path.suffix.lower() not in (".jsonl", ".txt"):
        raise DataError(f'prompts={path} must be a .jsonl file with rows {{"prompt": ...}} or a .txt file, one a line.')
    # Only \n ends a line: a JSON string may contain Unicode's other line separators.
    lines = _read("prompts", str(path)).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    parse = _from_json if path.suffix.lower() == ".jsonl" else _from_text
    name = "standard input" if is_input else path
    prompts = [parse(line, f"{name}, line {number},") for number, line in enumerate(lines, start=1)]
    if not prompts:
        raise DataError(f"prompts={settings.prompts} holds no prompts; give at least one line.")
    return prompts


def format_completion(completion: Completion, number: int) -> str:
    """Format completion `number` (from 0) for a terminal; of many only the first, as the output file has them all."""
    if number >= _NUM_SHOWN:
        return "\n..." if number == _NUM_SHOWN else ""
    chosen = "" if completion.adapter is None else f"  [{completion.adapter}]"
    return f"\n> {completion.prompt}{chosen}\n{indent(completion.completion.strip(), '  ')}"


def _from_json(line: str, location: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{location} is not JSON: {error.msg} at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:  # integers with thousands of digits, or a thousand levels
        raise DataError(f"{location} is not JSON: {error}.") from error
    text, messages = (row.get(name) if isinstance(row, dict) else None for name in ("prompt", "messages"))
    if isinstance(text, str) == (messages is not None):
        wanted = '{"prompt": "some text"} or {"messages": [...]}'
        raise DataError(f"{location} is not a row {wanted}: it is {line.strip()[:60]}.")
    adapter = row.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise DataError(f"{location} has no name of an adapter: {str(adapter)[:60]}.")
    unread = _NOT_WITH_PROMPT if messages is None else _NOT_WITH_MESSAGES
    if extra := next((name for name in unread if row.get(name)), None):
        raise DataError(f"{location} has {extra!r}, which would be ignored: {unread[extra]}, or remove it.")
    if isinstance(text, str):
        return replace(_make_prompt(text, location), adapter=adapter)
    conversation = {name: row[name] for name in ("messages", "tools", "system") if row.get(name) is not None}
    _refuse_surrogates(json.dumps(conversation, ensure_ascii=False), location)
    return Prompt(_last_text(messages, location), location, adapter, conversation)


def _last_text(messages: Any, location: str) -> str:
    """The text of the last message, which the model should answer."""
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise DataError(f'{location} must have messages such as [{{"role": "user", "content": "some text"}}].')
    last = messages[-1]
    if last.get("role", last.get("from")) in ("assistant", "gpt", "chatgpt", "bot", "model"):
        raise DataError(f"{location} ends with a message of the assistant, which is to answer; remove that message.")
    text = last.get("content", last.get("value"))
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _check_conversation(conversation: Mapping[str, Any], location: str, settings: GenerateSettings) -> None:
    """Raise DataError if `settings` do not suit a conversation."""
    if not settings.chat:
        raise DataError(f"{location} has messages, which go through the model's chat template; set chat=true.")
    first = conversation["messages"][0]
    if settings.system is not None and ("system" in conversation or first.get("role", first.get("from")) == "system"):
        raise DataError(f"{location} has a system message of its own, and system= is another; remove one of them.")


def _from_text(line: str, location: str) -> Prompt:
    return _make_prompt(line.rstrip("\r\n"), location)


def _make_prompt(text: str, location: str) -> Prompt:
    if not text.strip():
        raise DataError(f"{location} is an empty prompt; give some text to continue, or delete the line.")
    _refuse_surrogates(text, location)
    return Prompt(text, location)


def _refuse_surrogates(text: str, location: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{location} has half of a surrogate pair (\\ud800 to \\udfff), which is not text.")


def _read(setting: str, path: str) -> str:
    try:
        return _standard_input() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{setting}={path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{setting}={path} cannot be read as UTF-8 text: {error}.") from error


@functools.cache  # it can be read only once, and both the check and the run need it
def _standard_input() -> str:
    return sys.stdin.read()
