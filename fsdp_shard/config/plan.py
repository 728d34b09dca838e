"""The whole config of `plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fsdp_shard.config.common import RunConfig, default_run_dir
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import PlanSettings
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, OptimConfig, TrainConfig


@dataclass
class PlanConfig(RunConfig, PlanSettings):
    """Memory that each rank of a run would need, from the config alone."""

    command: ClassVar[str] = "plan"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "planned"
    unused: ClassVar[tuple[str, ...]] = ("seed", "model.kernels")  # what fused kernels save is not known

    run_dir: str = default_run_dir("plan")
    model: ModelConfig = field(default_factory=ModelConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
