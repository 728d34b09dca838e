"""The recorded settings of a run: `run_config.yaml` in its steps, and `config.yaml` in its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import RUN_CONFIG
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import chosen_options, in_yaml, read_bounded, run_limited, walk

if TYPE_CHECKING:
    from fsdp_shard.training.config import FinetuneSettings

_WHERE = ("run_dir", "resume")  # of the run, and no setting of how it trains
_ABSENT = "not set"


def read_settings(path: Path) -> dict[str, Any] | None:
    """Read recorded settings; None if there is no such file. Raises CheckpointError if it is damaged."""
    if not checkpoint.has_file(path.parent, path.name):
        return None
    return parse_settings(read_bounded(checkpoint.member(path.parent, path.name), "settings_bytes"), str(path))


def parse_settings(content: bytes, what: str) -> dict[str, Any]:
    """Parse settings; their `defaults`, a list, become the choice of each group.

    Raises:
        CheckpointError: They are damaged; `what` names them.
    """
    # YAML allows unlimited repetition and nesting, for which its parser needs quadratic time.
    return run_limited(lambda: _parse(content, what), f"reading the settings in {what}", error=CheckpointError)


def _parse(content: bytes, what: str) -> dict[str, Any]:
    try:
        document: Any = OmegaConf.to_container(OmegaConf.create(content.decode()), resolve=False)
        return {**document, "defaults": chosen_options(document["defaults"])}
    except Exception as error:  # YAML, OmegaConf and a file that is not a map share no exception class
        raise CheckpointError(
            f"{what} is damaged: it is not the settings of a run ({type(error).__name__})."
        ) from error


def settings_changed_since(config: FinetuneSettings, step_directory: Path) -> list[str] | None:
    """Return `name before -> now` of each setting that differs from those that made a step; see `changed_values`."""
    changes = changed_values(config, step_directory)
    return None if changes is None else [f"{name} {was} -> {value}" for name, (was, value) in changes.items()]


def changed_values(config: FinetuneSettings, step_directory: Path) -> dict[str, tuple[str, str]] | None:
    """Return the values, before and now, of each setting that differs from those that made a step.

    Args:
        config: The settings now.
        step_directory: The step.

    Returns:
        The changes by name, in the order of the settings; None if the step does not record any settings.

    Raises:
        CheckpointError: run_config.yaml is damaged.
    """
    if (before := read_settings(step_directory / RUN_CONFIG)) is None:
        return None
    now = parse_settings(config.to_yaml().encode(), "the config")
    names = [
        *now["defaults"],
        *(name for name, field, value in walk(config) if not _is_new(name, field, value, before)),
    ]
    values = {name: (_value(before, name), _value(now, name)) for name in names if name not in _WHERE}
    return {name: (was, value) for name, (was, value) in values.items() if was != value}


def _is_new(name: str, field: Field[Any], value: Any, before: Mapping[str, Any]) -> bool:
    """Whether a setting is missing from those before, such as a setting of another wrapper, and has its default."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return _value(before, name) == _ABSENT and value == default


def _value(document: Mapping[str, Any], name: str) -> str:
    """The YAML value of the setting with this dotted name, or the choice of the group with this name."""
    if name in document["defaults"]:
        return str(document["defaults"][name])
    found: Any = document
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            return _ABSENT
        found = found[key]
    return in_yaml(found)
