"""A config as the text of config.yaml, which the command composes again to the same config."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fsdp_shard.checkpoint import CONFIG_START
from fsdp_shard.utils import redact, redact_setting


def as_yaml(config: Any, command: str, chosen: Mapping[str, str], own_recipe: str) -> str:
    """Return all settings of a config dataclass, without secrets, and a defaults list of its groups.

    Args:
        config: The config.
        command: The command that has it.
        chosen: The option of each group.
        own_recipe: The file name of the user's recipe that made the run.
    """
    from omegaconf import OmegaConf

    program = f"run {own_recipe}" if own_recipe else command
    comment = f"{CONFIG_START}{program} THIS_FILE run_dir=NEW"
    groups = [{name: option} for name, option in chosen.items()]
    defaults = OmegaConf.to_yaml({"defaults": [f"{command}_schema", *groups, "_self_"]})
    settings = OmegaConf.structured(_change_text(config, lambda name, text: escape(redact_setting(name, text))))
    return redact(f"{comment}\n{defaults}{OmegaConf.to_yaml(settings)}")


def _change_text(config: Any, change: Callable[[str, str], str], prefix: str = "") -> Any:
    """A copy of a config dataclass whose text is what `change` makes of its dotted name and value."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = _change_text(value, change, f"{name}.")
        elif isinstance(value, str | list | dict):
            changed[field.name] = _change_texts(value, partial(change, name))
    return dataclasses.replace(config, **changed)


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A text, or the texts in a list or a map, as `change` makes them; all else as it is."""
    if isinstance(value, list):
        return [_change_texts(one, change) for one in value]
    if isinstance(value, dict):
        return {key: _change_texts(one, change) for key, one in value.items()}
    return change(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    """Escape `${` in `text`, so that OmegaConf does not resolve it."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
