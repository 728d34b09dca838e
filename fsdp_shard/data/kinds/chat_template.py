"""The settings of chat templates (`data.chat_template`, `data.roles`) that all kinds with conversations share.

`chat_spans.py` renders conversations for training, and `inference/generation/tokenize_prompts.py` for `generate`.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.data.kinds.kind import RowSettings, Tokenizer
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import tokenizer_files
from fsdp_shard.utils import Parsed, first_line, setting


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
class TemplateSettings(RowSettings):
    """Settings of the kinds of rows that a chat template renders."""

    roles: Any = setting(
        None,
        "kind=chat and preference: role names of the data and the roles that they are, such as {bot: assistant, "
        "prompter: user}.",
    )
    chat_template: str | None = setting(
        None,
        "kind=chat and preference: a file with a Jinja template, or the name of one of the tokenizer's, to train with "
        "and save with the checkpoints. Default: that of the tokenizer.",
    )

    template_text = Parsed("chat_template", _read_template)


def check_template(tokenizer: Tokenizer, chosen_by: str, other: str) -> None:
    """Raise DataError if conversations cannot be tokenized.

    Args:
        tokenizer: The tokenizer.
        chosen_by: What needs a chat template, for messages.
        other: What else could be done without one.
    """
    from jinja2 import TemplateSyntaxError

    if not tokenizer.chat_template:
        raise DataError(
            f"{chosen_by} needs a chat template, but the model's tokenizer has none ({tokenizer_files(tokenizer)}). "
            f"Set data.chat_template to a file with one, start from an instruction-tuned model, or {other}."
        )
    if not tokenizer.is_fast:
        raise DataError(
            f"{chosen_by} needs the offsets of tokens in the text, which the model's slow tokenizer does not "
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
            f"The chat template of {tokenizer_files(tokenizer)} is not valid, line {error.lineno}: {error}. Correct it."
        ) from error
    except Exception:  # a template is a program
        pass  # it rejects this conversation


def user_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a conversation with one message of a user, up to where the assistant begins.

    Raises:
        DataError: The chat template refuses it.
    """
    message = {"role": "user", "content": text}
    try:
        ids: Any = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program
        raise DataError(
            f"The chat template of {tokenizer_files(tokenizer)} fails with a single user's message: "
            f"{first_line(error)} Set data.chat_template to another one."
        ) from error
    return list(ids)


def with_chat_template(tokenizer: Tokenizer, settings: TemplateSettings) -> Tokenizer:
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
