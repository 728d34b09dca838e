"""The whole config of each command, made of the packages' own config dataclasses, and the options that Hydra offers.

Each is loaded when it is first asked for: `convert` is over before all the others would be there. Imports no torch: a
config is composed and checked before anything heavy is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_shard.config.base import RunConfig as RunConfig

if TYPE_CHECKING:
    from fsdp_shard.config.convert import ConvertConfig as ConvertConfig
    from fsdp_shard.config.doctor import DoctorConfig as DoctorConfig
    from fsdp_shard.config.evaluate import EvaluateConfig as EvaluateConfig
    from fsdp_shard.config.finetune import FinetuneConfig as FinetuneConfig
    from fsdp_shard.config.generate import GenerateConfig as GenerateConfig
    from fsdp_shard.config.options import OPTIONS as OPTIONS
    from fsdp_shard.config.plan import PlanConfig as PlanConfig

COMMANDS = ("finetune", "convert", "evaluate", "generate", "plan", "doctor")

# Name -> the module that has it.
_HOMES = {f"{command.capitalize()}Config": command for command in COMMANDS} | {"OPTIONS": "options"}


def schema_of(command: str) -> type[RunConfig]:
    """The config of one of `COMMANDS`."""
    schema: type[RunConfig] = __getattr__(f"{command.capitalize()}Config")
    return schema


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
