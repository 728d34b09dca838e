"""The chat template settings shared by all kinds with conversations: the template, its variables, role names.

`chat_spans.py` renders conversations for training, and `inference/generation/tokenize_prompts.py` for `generate`.
"""

import copy
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp_shard.data.kinds.conversation import check_role_names
from fsdp_shard.data.kinds.kind import RowSettings, Tokenizer
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import tokenizer_files
from fsdp_shard.utils import Parsed, first_line, setting

_DATE = "\ue000date\ue001"  # private-use characters, which no template writes

# Variables that transformers passes to every template, so a default would be ignored.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def read_chat_template(value: str | None, name: str) -> str | None:
    """Return the content of the file `value`; None if it is not a file and may be the name of a template."""
    path = Path(value or "").expanduser()
    try:
        if value and (path.is_file() or path.suffix or len(path.parts) > 1):
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={value} cannot be read: {error}. Give a file with a Jinja template.") from error
    return None


def parse_chat_template_kwargs(value: Any, name: str) -> dict[str, Any]:
    """Parse the values of chat template variables; raise ConfigError unless they map names to JSON values."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value} is not a mapping; give variables, such as {{enable_thinking: false}}.")
    for key, given in (value or {}).items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or key in _GIVEN:
            raise ConfigError(
                f"{name} has the name {key!r}, which is not a variable of a chat template that can be set; give one "
                f"that the template uses, such as enable_thinking."
            )
        if not _is_plain(given):
            raise ConfigError(f"{name}.{key}={given} must be a string, number, boolean, list or mapping.")
    return dict(value or {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


class ChosenTemplate(Protocol):
    """Settings that choose a chat template.

    Attributes:
        chat_template: A file, or the name of one of the tokenizer's templates; None for the tokenizer's own template.
        template_text: The content of the file; None if there is none.
        template_variables: Values of the template's variables, by name.
    """

    chat_template: str | None

    @property
    def template_text(self) -> str | None: ...

    @property
    def template_variables(self) -> dict[str, Any]: ...


@dataclass
class TemplateSettings(RowSettings):
    """Settings of the kinds whose rows a chat template renders."""

    roles: Any = setting(
        None,
        "kind=chat and preference: maps role names in the data to roles, such as {bot: assistant, prompter: user}.",
    )
    chat_template: str | None = setting(
        None,
        "kind=chat and preference: a file with a Jinja template, or the name of one of the tokenizer's templates, for "
        "training and to save with the checkpoints. Default: the tokenizer's template.",
    )

    # Any: OmegaConf cannot replace an optional dict that is None by a mapping.
    chat_template_kwargs: Any = setting(
        None,
        "kind=chat and preference: values of chat template variables, such as {enable_thinking: false} or "
        "{date_string: 26 Jul 2024}. They become defaults of the template saved with the checkpoints.",
    )

    template_text = Parsed("chat_template", read_chat_template)
    template_variables = Parsed("chat_template_kwargs", parse_chat_template_kwargs)

    def check_kind(self, prefix: str) -> None:
        check_role_names(self.roles or {}, f"{prefix}roles")


def check_template(tokenizer: Tokenizer, chosen_by: str, other: str) -> None:
    """Raise DataError if conversations cannot be tokenized.

    Args:
        tokenizer: The tokenizer.
        chosen_by: The setting that requires a chat template, for messages.
        other: The alternative without one.
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
    """Return the tokens of a conversation with one user message, up to the beginning of the assistant's turn.

    Raises:
        DataError: The chat template rejects it.
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


def writes_date(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes the current date into a conversation, like Llama 3's."""
    hiding = "{% macro strftime_now(format) %}" + _DATE + "{% endmacro %}"
    message = {"role": "user", "content": ""}
    with suppress(Exception):  # a template is a program
        template = hiding + str(tokenizer.get_chat_template())
        return _DATE in str(tokenizer.apply_chat_template([message], chat_template=template, tokenize=False))
    return False


def with_chat_template(tokenizer: Tokenizer, settings: ChosenTemplate, prefix: str = "data.") -> Tokenizer:
    """Return a copy of `tokenizer` with the chat template that `settings` choose, and defaults for its variables.

    The copy has no other template. Without such settings, `tokenizer` itself is returned.

    Args:
        tokenizer: The tokenizer.
        settings: The template and its variables.
        prefix: Prefix of the settings' names, for messages.

    Raises:
        DataError: The tokenizer has no template of that name, or has one with the name of the file; or the template
            does not use a variable.
    """
    name, text, own = settings.chat_template, settings.template_text, tokenizer.chat_template
    variables = settings.template_variables
    if name is None:
        return with_template_variables(tokenizer, variables, f"{prefix}chat_template_kwargs")
    templates = own if isinstance(own, dict) else {"default": own} if own else {}
    if (text is None) == (name not in templates):
        problem = "no file, and the tokenizer has no template of that name" if text is None else "a file and a template"
        raise DataError(
            f"{prefix}chat_template={name} is {problem}; the tokenizer has {', '.join(templates) or 'none'}. Give the "
            f"path of a file with a Jinja template, or one of these names."
        )
    changed = copy.copy(tokenizer)
    changed.chat_template = templates[name] if text is None else text
    return with_template_variables(changed, variables, f"{prefix}chat_template_kwargs")


def with_template_variables(tokenizer: Tokenizer, variables: Mapping[str, Any], name: str) -> Tokenizer:
    """Return a copy of `tokenizer` whose chat template has defaults for variables, or itself if there are none.

    The defaults become part of the template, so they apply wherever it is rendered, here or elsewhere.

    Args:
        tokenizer: The tokenizer.
        variables: Name -> value.
        name: The setting that defines them, for messages.

    Raises:
        DataError: The tokenizer has several templates or none, or its template does not use a variable.
    """
    template: Any = tokenizer.chat_template
    if not variables:
        return tokenizer
    if not isinstance(template, str):
        raise DataError(
            f"{name} needs one chat template, and the tokenizer has {', '.join(template or ()) or 'none'} "
            f"({tokenizer_files(tokenizer)}). Save it with one, or remove {name}."
        )
    for variable in variables:
        given = variable in tokenizer.special_tokens_map
        if given or not re.search(rf"\b{variable}\b", template):
            why = "is a special token of the tokenizer" if given else "is not a variable that the chat template uses"
            raise DataError(f"{name}.{variable} {why} ({tokenizer_files(tokenizer)}); correct the name, or remove it.")
    changed = copy.copy(tokenizer)
    # Templates are rendered with trim_blocks, which drops a newline after a statement.
    lines = [f"{{% set {variable} = {variable} | default({value!r}) %}}\n" for variable, value in variables.items()]
    changed.chat_template = "".join(lines) + template
    return changed
