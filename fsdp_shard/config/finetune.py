"""The whole config of `finetune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fsdp_shard.checkpoint import DEFAULT_SHARD_SIZE, CheckpointConfig
from fsdp_shard.config.common import RunConfig, default_run_dir
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, OptimConfig, TrainConfig
from fsdp_shard.utils import setting


@dataclass
class FinetuneConfig(RunConfig):
    """Fine-tune a causal language model under FSDP."""

    # `shard`, `adapter` and `optim` have the type that all options of a group share; conf/finetune.yaml chooses one.
    command: ClassVar[str] = "finetune"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "started"
    unused: ClassVar[tuple[str, ...]] = ()

    run_dir: str = default_run_dir("finetune")
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

    def check(self, prefix: str) -> None:
        """Rules that tie settings of several sections together."""
        launch, checkpoint = self.launch, self.checkpoint
        if not checkpoint.optimizer and (launch.max_restarts or launch.is_elastic):
            name = "max_restarts" if launch.max_restarts else "nodes"
            raise ConfigError(
                f"{prefix}launch.{name}={getattr(launch, name)} means to go on from the last checkpoint, and with "
                f"{prefix}checkpoint.optimizer=false none can be gone on from; leave one of them out."
            )
        if not self.adapter.trains_all and checkpoint.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}checkpoint.max_shard_size={checkpoint.max_shard_size} would do nothing with an adapter, "
                f"which peft knows as one file; leave it out."
            )
        flash = self.model.attention == "flash_attention_2"
        if self.data.packing and flash and self.train.micro_batch_size > 1:
            raise ConfigError(
                f"{prefix}data.packing=true with {prefix}model.attention=flash_attention_2 needs {prefix}"
                f"train.micro_batch_size=1: in a larger batch transformers does not see where documents "
                f"begin, and they would see each other. Or use {prefix}model.attention=sdpa."
            )
