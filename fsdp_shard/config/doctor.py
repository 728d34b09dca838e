"""The whole config of `doctor`: that of `finetune`, of which nothing must be given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fsdp_shard.config.finetune import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.models import ModelConfig


@dataclass
class DoctorConfig(FinetuneConfig):
    """Say what would go wrong in a finetune with these settings, before it does."""

    command: ClassVar[str] = "doctor"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "planned"
    writes: ClassVar[bool] = False

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    data: DataConfig = field(default_factory=lambda: DataConfig(path=""))
