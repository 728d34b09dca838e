"""The settings that all commands have, and what their config classes declare."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.utils import setting

Ranks = Literal["started", "planned", "one"]


def default_run_dir(command: str) -> str:
    """The default of `run_dir`; `now` is a resolver of Hydra's, and stays the same through a run."""
    return setting(
        f"outputs/{command}/${{now:%Y-%m-%d_%H-%M-%S}}", "Output directory of the run, created if it does not exist."
    )


@dataclass
class RunConfig:
    """The settings of every command.

    Attributes:
        command: The command that has this config.
        ranks_are: The meaning of launch.ranks: ranks to start, ranks to plan for, or one, as the command works in a
            single process.
        unused: Settings and sections that the command does not use: `--help` omits them, and setting one is an error.
        writes: Whether the command writes a run_dir, with its config.yaml.
    """

    command: ClassVar[str] = ""
    ranks_are: ClassVar[Ranks] = "one"
    unused: ClassVar[tuple[str, ...]] = ("launch",)
    writes: ClassVar[bool] = True

    run_dir: str = default_run_dir("run")
    seed: int = setting(0, "Seed of all random number generators.", minimum=0)
    debug: bool = setting(False, "Show tracebacks of errors and the messages of torch's launcher.")
    launch: LaunchConfig = field(default_factory=LaunchConfig)


def is_used(schema: type[RunConfig], name: str) -> bool:
    """Whether the command reads the setting of this dotted name."""
    return not any(name == unused or name.startswith(f"{unused}.") for unused in schema.unused)


def command_of(schema: type) -> str:
    """The command that has the config `schema`: its own, or that of the class that it extends."""
    if command := getattr(schema, "command", ""):
        return str(command)
    raise TypeError(f"{schema.__name__} must be, or extend, the config of a command (fsdp_shard.config)")
