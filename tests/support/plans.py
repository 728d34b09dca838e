"""Planned runs of the tiny model, and plans of their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import MemoryPlan, PlannedRun, plan_memory
from fsdp_shard.sharding import Fsdp2Config
from fsdp_shard.training import AdamWConfig, TrainConfig
from tests.support.tiny import llama_config


def planned(**settings: Any) -> PlannedRun:
    """A run of the tiny model; `settings` replace its fields."""
    run = PlannedRun(ModelConfig(path="x"), Fsdp2Config(), TrainConfig(), AdamWConfig(), 64, 1)
    return replace(run, **settings)


def plan(config: PretrainedConfig | None = None, **settings: Any) -> MemoryPlan:
    """The memory of such a run, of the tiny model or of `config`."""
    return plan_memory(config or llama_config(), planned(**settings))
