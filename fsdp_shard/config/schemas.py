"""The commands that have a config, and the dataclass of each, loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module

from fsdp_shard.config.common import RunConfig

COMMANDS = ("finetune", "convert", "evaluate", "generate", "plan", "doctor")


def schema_of(command: str) -> type[RunConfig]:
    """The config dataclass of one of `COMMANDS`."""
    schema: type[RunConfig] = getattr(import_module(f"fsdp_shard.config.{command}"), f"{command.capitalize()}Config")
    return schema
