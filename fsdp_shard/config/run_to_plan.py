"""Converts the settings of a finetune run to those of `plan`, which compares its plan with the run's measurements."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fsdp_shard.checkpoint import CONFIG_FILE
from fsdp_shard.config.command_configs import OPTIONS, RunConfig, command_of, is_used
from fsdp_shard.config.preset_file import CONFIG_NAME, read_settings
from fsdp_shard.config.reference import groups_of, settings_of
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import chosen_options

# Settings that may also be given, as they do not change the planned run.
_FREE = ("run", "run_dir", "debug", "device", "dispatch", "adapters", "trace", "hydra")


def split_run(arguments: Sequence[str], schema: type[RunConfig]) -> tuple[str | None, list[str]]:
    """Return the run to plan, if any, and all arguments; a path as the first argument becomes `run=PATH`.

    Raises:
        ConfigError: The path is not a directory, or some settings would plan another run.
    """
    if "run" not in {field.name for field in dataclasses.fields(schema)}:
        return None, list(arguments)
    rest = list(arguments)
    if rest and not rest[0].startswith("-") and (Path(rest[0]).is_dir() or "=" not in rest[0]):
        if Path(rest[0]).suffix in (".yaml", ".yml"):
            return None, rest
        rest[0] = f"run={rest[0]}"
    given = [argument.removeprefix("run=") for argument in rest if argument.startswith("run=")]
    if not given or given[-1] == "null":
        return None, rest
    run = str(Path(given[-1]).expanduser())
    if not Path(run).is_dir():
        raise ConfigError(f"run={given[-1]} is not a directory; give the run_dir of a run of finetune.")
    if not (Path(run) / CONFIG_FILE).is_file() and (Path(run) / "config.json").is_file():
        raise ConfigError(f"{run} is a model, not the run_dir of a run of finetune; plan it by model.path={run}.")
    names = [a.partition("=")[0].lstrip("+~") for a in rest if not a.startswith("-")]
    if other := [name for name in names if name.partition(".")[0] not in _FREE]:
        raise ConfigError(
            f"{', '.join(other)} would plan another run than run={given[-1]}, whose settings are planned as they were, "
            f"so that they can be compared; remove {'it' if len(other) == 1 else 'them'}."
        )
    return run, rest


def register_run(run: str, schema: type[RunConfig]) -> str:
    """Add a run's settings that affect its plan to Hydra's ConfigStore as CONFIG_NAME.

    Returns:
        The file with the settings.

    Raises:
        ConfigError: The file cannot be read, or does not belong to a finetune run.
    """
    file = str(Path(run) / CONFIG_FILE)
    content = read_settings(file)
    defaults = content.pop("defaults", [])
    entries = defaults if isinstance(defaults, list) else []
    if "finetune_schema" not in entries:
        raise ConfigError(f"{file} is not the config of a run of finetune, the only ones that can be planned.")
    groups = groups_of(schema)
    chosen = chosen_options(entries)
    overrides = [{f"override /{group}": option} for group, option in chosen.items() if group in groups]
    command = command_of(schema)
    node = OmegaConf.create({"defaults": [f"/{command}", *overrides, "_self_"], **_plan_settings(content, schema)})
    ConfigStore.instance().store(name=CONFIG_NAME, node=node)
    return file


def _plan_settings(content: dict[str, Any], schema: type[RunConfig]) -> dict[str, Any]:
    """The settings that plans also have."""
    names = {setting.name for setting in settings_of(schema)}
    sections = {field.name for field in dataclasses.fields(schema)} - set(_FREE)
    found: dict[str, Any] = {}
    for section, values in content.items():
        if section not in sections or not isinstance(values, dict):
            continue
        kept = {
            name: value
            for name, value in values.items()
            if is_used(schema, f"{section}.{name}") and (section in OPTIONS or f"{section}.{name}" in names)
        }
        found |= {section: kept} if kept else {}
    return found
