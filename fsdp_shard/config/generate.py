"""The whole config of `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fsdp_shard.config.common import RunConfig, default_run_dir
from fsdp_shard.inference import GenerateSettings


@dataclass
class GenerateConfig(RunConfig, GenerateSettings):
    """Generate text from a checkpoint, its blocks spread over the devices and the disk there are.

    Several ranks each hold the model, and share the prompts.
    """

    command: ClassVar[str] = "generate"
    ranks_are: ClassVar[Literal["started", "planned", "one"]] = "started"
    unused: ClassVar[tuple[str, ...]] = ()

    run_dir: str = default_run_dir("generate")
