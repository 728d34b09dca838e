"""How a setting is declared: default, help text, range and choices stand in one place, beside the field.

The config dataclasses live with what they configure and use `setting(...)` for their fields. `check(config)` walks a
whole tree of them and names the first setting that is out of range by its full dotted name; the config reference is
written from the same declarations. This module knows no particular setting and does not know Hydra.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fsdp_shard.errors import ConfigError

T = TypeVar("T")

_RANGES: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.ge, "at least"),
    ("above", operator.gt, "more than"),
    ("maximum", operator.le, "at most"),
)

REQUIRED: Any = "???"  # OmegaConf's mark of a value that the user must give


def setting(
    default: T,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str | bool] | None = None,
    warning: str | None = None,
) -> T:
    """Declare a field of a config dataclass.

    `minimum` and `maximum` are inclusive, `above` is exclusive; `choices` are the accepted values. A run that
    has the setting on says `warning` first. Lists, dicts and nested dataclasses are given as `default` too and are
    copied for each instance.
    """
    metadata = {"help": help, "minimum": minimum, "above": above, "maximum": maximum, "choices": choices}
    metadata["warning"] = warning
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        field: T = dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
        return field
    return dataclasses.field(default=default, metadata=metadata)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every (dotted name, field, value) of a config dataclass and the dataclasses in it, leaves only."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, name + ".")
        else:
            yield name, field, value


def warnings_of(config: Any) -> list[str]:
    """What whoever starts a run must know of settings that are on, one line each."""
    said = ((name, field.metadata.get("warning"), value) for name, field, value in walk(config))
    return [f"warning: {name}={in_yaml(value)}: {text}" for name, text, value in said if text and value]


def check(config: Any) -> None:
    """Raise ConfigError for the first setting of `config` that is missing, out of its range or not a known choice.

    A dataclass may also have a method `check(self, prefix: str)` for rules that tie several of its fields together.
    """
    for name, field, value in walk(config):
        check_one(name, field, value)
    _check_rules(config, "")


def check_one(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    """`check` of one setting."""
    if value == REQUIRED:
        raise ConfigError(f"{name} is not set: {field.metadata.get('help', 'it is required')} Add {name}=VALUE.")
    if value is None:
        return
    rules = field.metadata
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        known = [in_yaml(choice) for choice in choices]
        raise ConfigError(f"{name}={in_yaml(value)} is not one of {', '.join(known)}{nearest(str(value), known)}.")
    for rule, holds, words in _RANGES:
        if (limit := rules.get(rule)) is not None and not holds(value, limit):
            raise ConfigError(f"{name}={value} is out of range: it must be {words} {limit}.")


def in_yaml(value: Any) -> str:
    """A value as people write it: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_rules(config: Any, prefix: str) -> None:
    if hasattr(config, "check"):
        config.check(prefix)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _check_rules(value, f"{prefix}{field.name}.")


def nearest(name: str, known: Sequence[str]) -> str:
    """`"; did you mean X?"`-style ending for the known name closest to `name`, or nothing when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
