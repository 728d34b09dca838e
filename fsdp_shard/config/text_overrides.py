"""Overrides of text settings: everything after the `=` is literal text, regardless of Hydra's syntax.

Quotes are interpreted only in a sweep: each of several quoted strings, separated by commas, is the value for one run.
"""

import re
from collections.abc import Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from fsdp_shard.config.config_yaml import escape
from fsdp_shard.config.reference import Setting
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED

_STRING = r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_EMPTY = "''"
_STRINGS = re.compile(rf"\s*{_STRING}(?:\s*,\s*{_STRING})+\s*", re.DOTALL)


def quote_text(arguments: Sequence[str], settings: Sequence[Setting], *, is_sweep: bool) -> list[str]:
    """Quote the values of text settings in `arguments` for Hydra; return all arguments.

    `null` marks a required text as not set.

    Args:
        arguments: Overrides and flags, as typed.
        settings: The settings of the command.
        is_sweep: Whether several quoted strings are separate values.

    Raises:
        ConfigError: A required text is empty, as in `model.path=$UNSET`.
    """
    texts = {setting.name: setting for setting in settings if setting.is_text}
    groups = {setting.name.partition(".")[0] for setting in settings if "." in setting.name}
    return [_quote_option(argument, groups) or _quote(argument, texts, is_sweep) for argument in arguments]


def _quote_option(argument: str, groups: set[str]) -> str:
    """Quote an option that is a number, such as `device=4090`, as Hydra requires; empty for other arguments."""
    name, _, option = argument.partition("=")
    return f'{name}="{option}"' if name in groups and option.isdecimal() else ""


def _quote(argument: str, texts: dict[str, Setting], is_sweep: bool) -> str:
    name, equals, text = argument.partition("=")
    setting = texts.get(name.lstrip("+"))
    if setting is None or not equals or (text == "null" and setting.can_unset):
        return argument
    if text == "null" and setting.has_no_default:
        return f"{name}={setting.default or _EMPTY}"
    if not text and setting.default == REQUIRED:
        raise ConfigError(f"{name} is empty: {setting.help} Add {name}=VALUE.")
    if is_sweep and _STRINGS.fullmatch(text):
        return f"{name}={escape(text)}"
    return f"{name}={QuotedString(escape(text), Quote.single).with_quotes()}"


def refuse_unquoted_list(arguments: Sequence[str], quoted: Sequence[str]) -> None:
    """Raise ConfigError for unquoted text that looks like several values, in a sweep that has no values.

    Args:
        arguments: Overrides and flags, as typed.
        quoted: The result of `quote_text` for them.
    """
    for argument, other in zip(arguments, quoted, strict=True):
        name, _, text = argument.partition("=")
        if argument != other and "," in text:
            values = ",".join(f'"{value}"' for value in text.split(","))
            raise ConfigError(
                f"-m asks for a run for each value, and {argument} is one text. Quote each of its values, such as "
                f"'{name}={values}', or remove -m."
            )
