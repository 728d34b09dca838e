"""The options of each group: a new wrapper, optimizer or preset is one line in its room, or a YAML file under conf/."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fsdp_shard.config.run_config import command_of
from fsdp_shard.inference import DispatchConfig, GenerationSettings
from fsdp_shard.planning import PlannedDispatchConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import OPTIMIZERS, AdapterConfig, LoraConfig, TrainConfig

# Group -> option -> its dataclass; YAML files in conf/GROUP/ are options too. There can be no group `checkpoint`: Hydra
# would take generate's `checkpoint=PATH` for a choice of it.
OPTIONS: dict[str, dict[str, type]] = {
    "shard": dict(WRAPPERS),
    "optim": dict(OPTIMIZERS),
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "train": {"default": TrainConfig},
    "dispatch": {"default": DispatchConfig, "planned": PlannedDispatchConfig},
    "generation": {"default": GenerationSettings},
}


def options_of(group: str) -> Mapping[str, type]:
    """Option -> its dataclass; empty for a setting that is not a group."""
    return OPTIONS.get(group, {})


def schema_name(command: str) -> str:
    """The name of a command's dataclass in the defaults list of its YAML file."""
    return f"{command}_schema"


def register(schema: type) -> None:
    """Put `schema` and the options of its groups into Hydra's ConfigStore, where conf/*.yaml find them by name.

    A recipe's own schema, with settings of its own, replaces the one that it extends.
    """
    from hydra.core.config_store import ConfigStore

    store: Any = ConfigStore.instance()
    store.store(name=schema_name(command_of(schema)), node=schema)
    for group in (member.name for member in fields(schema)):
        for name, node in options_of(group).items():
            store.store(group=group, name=name, node=node)
