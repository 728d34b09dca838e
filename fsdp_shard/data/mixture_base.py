"""The settings of one source of a mixture. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.settings import REQUIRED, check_one, nearest, setting, walk


@dataclass
class MixtureSource:
    """A source of `data.mixture`; what is null is as in `data.*`."""

    path: str = setting(REQUIRED, "What to train on, given like data.path.")
    weight: float = setting(1.0, "Its part of the samples, in proportion to the other weights.", above=0.0)
    kind: str | None = setting(None, "See data.kind.", choices=("text", "chat", "instruction", "pairs"))
    subset: str | None = setting(None, "See data.subset.")
    split: str | None = setting(None, "See data.split.")
    sample_by: str | None = setting(None, "See data.sample_by.", choices=("document", "paragraph", "line"))
    text_column: str | None = setting(None, "See data.text_column.")
    label_column: str | None = setting(None, "See data.label_column.")
    messages_column: str | None = setting(None, "See data.messages_column.")
    instruction_column: str | None = setting(None, "See data.instruction_column.")
    input_column: str | None = setting(None, "See data.input_column.")
    response_column: str | None = setting(None, "See data.response_column.")
    source_column: str | None = setting(None, "See data.source_column.")
    target_column: str | None = setting(None, "See data.target_column.")


def parse_sources(given: Any, name: str) -> dict[str, MixtureSource]:
    """The sources of a mixture by name, from the mapping that the setting `name` holds, as a config has it.

    Raises ConfigError for whatever in it is unknown, missing, of the wrong type or out of range.
    """
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{name}={given} is no mapping; give sources by name, such as {{books: {{path: a.jsonl}}}}.")
    return {str(key): _parse(value, f"{name}.{key}") for key, value in given.items()}


def _parse(given: Any, name: str) -> MixtureSource:
    if isinstance(given, Mapping):
        known = {member.name: member for member in fields(MixtureSource)}
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"{name}.{key} is no setting of a source{nearest(str(key), list(known))}.")
            kinds, words = ((int, float), "a number") if key == "weight" else ((str, type(None)), "text")
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"{name}.{key}={value} is not {words}.")
        given = MixtureSource(**given)
    if not isinstance(given, MixtureSource):
        raise ConfigError(f"{name}={given} is no mapping; give at least its path, such as {{path: a.jsonl}}.")
    for dotted, member, value in walk(given, f"{name}."):
        check_one(dotted, member, value)
    if not math.isfinite(given.weight):
        raise ConfigError(f"{name}.weight={given.weight} is no weight; give a number.")
    return given
