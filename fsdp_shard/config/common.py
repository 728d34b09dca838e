"""What the configs of all commands have, and how Hydra is told of one. Nothing is instantiated through `_target_`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.utils import setting

# The settings that are groups: each stands for one of several dataclasses (`options.py`).
_GROUPS = ("shard", "optim", "adapter", "train", "dispatch", "generation")

_RUN_DIR_HELP = "Directory of everything that the run leaves; it is made if it is not there."


def default_run_dir(command: str) -> str:
    """The default of `run_dir`; `now` is Hydra's, and stays the same through a run."""
    return setting(f"outputs/{command}/${{now:%Y-%m-%d_%H-%M-%S}}", _RUN_DIR_HELP)


@dataclass
class RunConfig:
    """What every command has."""

    # The command that this is the config of, and what its launch.ranks are: ranks that are started, ranks that are only
    # planned for, or one, as the command works in a single process.
    command: ClassVar[str] = ""
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "one"
    # Settings and sections that the command does not use: `--help` leaves them out, and giving one is an error.
    unused: ClassVar[tuple[str, ...]] = ("launch",)
    # Whether the command has a run_dir of its own, with its config.yaml in it.
    writes: ClassVar[bool] = True

    run_dir: str = default_run_dir("run")
    seed: int = setting(0, "Seed of everything random.", minimum=0)
    debug: bool = setting(False, "Show tracebacks of errors and the messages of torch's launcher.")
    launch: LaunchConfig = field(default_factory=LaunchConfig)


def options_of(group: str) -> Mapping[str, type]:
    """Option -> the dataclass behind it; nothing for a setting that is no group, and then nothing is loaded."""
    if group not in _GROUPS:
        return {}
    from fsdp_shard.config.registry import OPTIONS

    return OPTIONS[group]


def is_used(schema: type[RunConfig], name: str) -> bool:
    """Whether the command reads the setting of this dotted name."""
    return not any(name == unused or name.startswith(f"{unused}.") for unused in schema.unused)


def command_of(schema: type) -> str:
    """The command that `schema` is the config of: its own, or that of the class it extends."""
    for base in schema.__mro__:
        if base.__dict__.get("command"):
            return str(base.__dict__["command"])
    raise TypeError(f"{schema.__name__} must be, or extend, the config of a command (fsdp_shard.config)")


def schema_name(command: str) -> str:
    """What the root YAML file of `command` calls its dataclass in its defaults list."""
    return f"{command}_schema"


def register(schema: type) -> None:
    """Put `schema` and the options of its groups into Hydra's ConfigStore, where conf/*.yaml find them by name.

    A recipe's own schema, with settings of its own, so takes the place of the one it extends.
    """
    from hydra.core.config_store import ConfigStore

    store: Any = ConfigStore.instance()
    store.store(name=schema_name(command_of(schema)), node=schema)
    for group in (member.name for member in fields(schema)):
        for name, node in options_of(group).items():
            store.store(group=group, name=name, node=node)
