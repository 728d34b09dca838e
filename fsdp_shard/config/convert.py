"""The whole config of `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.checkpoint import ConvertConfig as ConvertSettings
from fsdp_shard.config.common import RunConfig, default_run_dir


@dataclass
class ConvertConfig(RunConfig, ConvertSettings):
    """Write the weights of any checkpoint in another layout, file size or dtype."""

    command: ClassVar[str] = "convert"
    unused: ClassVar[tuple[str, ...]] = ("seed", "launch")

    run_dir: str = default_run_dir("convert")
