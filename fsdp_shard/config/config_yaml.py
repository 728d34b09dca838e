"""Renders a config as config.yaml, from which the command composes the same config again."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fsdp_shard.checkpoint import CONFIG_START
from fsdp_shard.utils import redact, redact_setting


def as_yaml(config: Any, command: str, chosen: Mapping[str, str], own_recipe: str) -> str:
    """Return all settings of a config dataclass, without secrets, and a defaults list of its groups.

    Args:
        config: The config.
        command: The command of the config.
        chosen: The option of each group.
        own_recipe: The file name of the user's own recipe, if one made the run.
    """
    from omegaconf import OmegaConf

    program = f"run {own_recipe}" if own_recipe else command
    comment = f"{CONFIG_START}{program} THIS_FILE run_dir=NEW"
    groups = [{name: option} for name, option in chosen.items()]
    defaults = OmegaConf.to_yaml({"defaults": [f"{command}_schema", *groups, "_self_"]})
    return redact(f"{comment}\n{defaults}{OmegaConf.to_yaml(_as_plain(config))}")


def _as_plain(value: Any, name: str = "") -> Any:
    """Convert settings to plain values, with secrets redacted and `${` escaped in strings; `name` is dotted."""
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {key: _as_plain(part, f"{name}.{key}" if name else key) for key, part in parts.items()}
    if isinstance(value, dict):
        return {key: _as_plain(one, name) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_plain(one, name) for one in value]
    return escape(redact_setting(name, value)) if isinstance(value, str) else value


def escape(text: str) -> str:
    """Escape `${` in `text`, so that OmegaConf does not resolve it."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
