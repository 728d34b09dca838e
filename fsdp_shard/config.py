"""The whole config of each command, made of the packages' own config dataclasses, and the options that Hydra offers.

A new wrapper, optimizer or preset is one line in `OPTIONS`, or a YAML file under conf/. Imports no torch: a config is
composed and checked before anything heavy is loaded. Nothing here is ever instantiated through `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from fsdp_shard.checkpoint.base import CheckpointConfig
from fsdp_shard.checkpoint.base import ConvertConfig as ConvertSettings
from fsdp_shard.data.base import DataConfig
from fsdp_shard.evaluation.base import EvaluateSettings
from fsdp_shard.inference.base import DispatchConfig, GenerateSettings, GenerationSettings
from fsdp_shard.launch import LaunchConfig
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning.base import PlannedDispatchConfig, PlanSettings
from fsdp_shard.settings import setting
from fsdp_shard.sharding.base import ShardConfig
from fsdp_shard.sharding.wrappers import WRAPPERS
from fsdp_shard.training.adafactor import AdafactorConfig
from fsdp_shard.training.adamw import AdamWConfig
from fsdp_shard.training.adamw8bit import AdamW8bitConfig
from fsdp_shard.training.adapter import AdapterConfig, LoraConfig
from fsdp_shard.training.base import OptimConfig, TrainConfig
from fsdp_shard.training.muon import MuonConfig
from fsdp_shard.training.sgd import SgdConfig

_RUN_DIR_HELP = "Directory of everything that the run leaves; it is made if it is not there."


def _run_dir(command: str) -> str:
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

    run_dir: str = _run_dir("run")
    seed: int = setting(0, "Seed of everything random.", minimum=0)
    debug: bool = setting(False, "Show tracebacks of errors and the messages of torch's launcher.")
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass
class FinetuneConfig(RunConfig):
    """Fine-tune a causal language model under FSDP."""

    # `shard`, `adapter` and `optim` have the type that all options of a group share; conf/finetune.yaml chooses one.
    command: ClassVar[str] = "finetune"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "started"
    unused: ClassVar[tuple[str, ...]] = ()

    run_dir: str = _run_dir("finetune")
    resume: str = setting(
        "auto",
        "auto: go on from the latest checkpoint in run_dir, if there is one; never: begin anew; or the PATH of a run "
        "or checkpoint to go on from.",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ConvertConfig(RunConfig, ConvertSettings):
    """Write the weights of any checkpoint in another layout, file size or dtype."""

    command: ClassVar[str] = "convert"
    unused: ClassVar[tuple[str, ...]] = ("seed", "launch")

    run_dir: str = _run_dir("convert")


@dataclass
class EvaluateConfig(RunConfig, EvaluateSettings):
    """Measure how well a checkpoint predicts a text."""

    command: ClassVar[str] = "evaluate"
    unused: ClassVar[tuple[str, ...]] = ("seed", "launch")

    run_dir: str = _run_dir("evaluate")


@dataclass
class GenerateConfig(RunConfig, GenerateSettings):
    """Generate text from a checkpoint, its blocks spread over the devices and the disk there are.

    Several ranks each hold the model, and share the prompts.
    """

    command: ClassVar[str] = "generate"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "started"
    unused: ClassVar[tuple[str, ...]] = ()

    run_dir: str = _run_dir("generate")


@dataclass
class PlanConfig(RunConfig, PlanSettings):
    """Memory that each rank of a run would need, from the config alone."""

    command: ClassVar[str] = "plan"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "planned"
    unused: ClassVar[tuple[str, ...]] = ("seed", "model.kernels")  # what fused kernels save is not known

    run_dir: str = _run_dir("plan")
    model: ModelConfig = field(default_factory=ModelConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# Command -> its config.
COMMANDS: dict[str, type[RunConfig]] = {
    schema.command: schema for schema in (FinetuneConfig, ConvertConfig, EvaluateConfig, GenerateConfig, PlanConfig)
}

# Group -> option -> the dataclass behind it; YAML files in conf/GROUP/ are options too. There can be no group
# `checkpoint`: Hydra would take generate's `checkpoint=PATH` for a choice of it.
OPTIONS: dict[str, dict[str, type]] = {
    "shard": dict(WRAPPERS),
    "optim": {
        "adamw": AdamWConfig,
        "adamw8bit": AdamW8bitConfig,
        "adafactor": AdafactorConfig,
        "muon": MuonConfig,
        "sgd": SgdConfig,
    },
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "train": {"default": TrainConfig},
    "dispatch": {"default": DispatchConfig, "planned": PlannedDispatchConfig},
    "generation": {"default": GenerationSettings},
}


def is_used(schema: type[RunConfig], name: str) -> bool:
    """Whether the command reads the setting of this dotted name."""
    return not any(name == unused or name.startswith(f"{unused}.") for unused in schema.unused)


def command_of(schema: type) -> str:
    """The command that `schema` is the config of: its own, or that of the class it extends."""
    for base in schema.__mro__:
        if base.__dict__.get("command"):
            return str(base.__dict__["command"])
    raise TypeError(f"{schema.__name__} must be, or extend, one of {', '.join(c.__name__ for c in COMMANDS.values())}")


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
    for group in {member.name for member in fields(schema)} & set(OPTIONS):
        for name, node in OPTIONS[group].items():
            store.store(group=group, name=name, node=node)
