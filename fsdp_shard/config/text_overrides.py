"""Overrides of settings that are text: what follows the `=` is the text, whatever it would mean to Hydra.

Only in a sweep are quotes read: two or more quoted strings, separated by commas, are a value for a run each.
"""

import re
from collections.abc import Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from fsdp_shard.config.config_yaml import escape
from fsdp_shard.config.reference import Setting
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED

_STRING = r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_STRINGS = re.compile(rf"\s*{_STRING}(?:\s*,\s*{_STRING})+\s*", re.DOTALL)


def quote_text(arguments: Sequence[str], settings: Sequence[Setting], *, is_sweep: bool) -> list[str]:
    """Quote the values of text settings in `arguments` for Hydra; return all arguments.

    Args:
        arguments: Overrides and flags, as typed.
        settings: The settings of the command.
        is_sweep: Whether several quoted strings are several values.

    Raises:
        ConfigError: A required text is empty, as `model.path=$UNSET` is.
    """
    texts = {setting.name: setting for setting in settings if setting.is_text}
    groups = {setting.name.partition(".")[0] for setting in settings if "." in setting.name}
    return [_quote_option(argument, groups) or _quote(argument, texts, is_sweep) for argument in arguments]


def _quote_option(argument: str, groups: set[str]) -> str:
    """An option that is a number, such as `device=4090`, in quotes, which Hydra wants; empty for other arguments."""
    name, _, option = argument.partition("=")
    return f'{name}="{option}"' if name in groups and option.isdecimal() else ""


def _quote(argument: str, texts: dict[str, Setting], is_sweep: bool) -> str:
    name, equals, text = argument.partition("=")
    setting = texts.get(name.lstrip("+"))
    if setting is None or not equals or (text == "null" and setting.can_unset):
        return argument
    if not text and setting.default == REQUIRED:
        raise ConfigError(f"{name} is empty: {setting.help} Add {name}=VALUE.")
    if is_sweep and _STRINGS.fullmatch(text):
        return f"{name}={escape(text)}"
    return f"{name}={QuotedString(escape(text), Quote.single).with_quotes()}"


def refuse_unquoted_list(arguments: Sequence[str], quoted: Sequence[str]) -> None:
    """Raise ConfigError for a text that looks like the values of a sweep that has none.

    Args:
        arguments: Overrides and flags, as typed.
        quoted: What `quote_text` made of them.
    """
    for argument, other in zip(arguments, quoted, strict=True):
        name, _, text = argument.partition("=")
        if argument != other and "," in text:
            values = ",".join(f'"{value}"' for value in text.split(","))
            raise ConfigError(
                f"-m asks for a run for each value, and {argument} is one text. Quote each of its values, such as "
                f"'{name}={values}', or leave out -m."
            )
