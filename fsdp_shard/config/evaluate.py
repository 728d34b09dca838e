"""The whole config of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.config.common import RunConfig, default_run_dir
from fsdp_shard.evaluation import EvaluateSettings


@dataclass
class EvaluateConfig(RunConfig, EvaluateSettings):
    """Measure how well a checkpoint predicts a text, or answers the questions of lm-evaluation-harness."""

    command: ClassVar[str] = "evaluate"
    unused: ClassVar[tuple[str, ...]] = ("seed", "launch")

    run_dir: str = default_run_dir("evaluate")
