"""The model of a planned run: that of `model.path`, or of the step that a run in `run_dir` would resume from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fsdp_shard.checkpoint import CHECKPOINTS, Location, Store
from fsdp_shard.models import ModelConfig
from fsdp_shard.training import AdapterConfig


class ResumableSettings(Protocol):
    """What of a config decides whether a run can resume with it."""

    run_dir: str
    model: ModelConfig
    adapter: AdapterConfig

    @property
    def source(self) -> Location:
        """What `model.path` leads to."""


@dataclass(frozen=True)
class PlannedModel:
    """The `source` of a model, the `step` that it is of, if any, and a `note` if it could not be compared with that."""

    source: Location
    step: Path | None = None
    note: str | None = None


def planned_model(config: ResumableSettings) -> PlannedModel:
    """Find the model of a run; without a step, torch is not loaded.

    Raises:
        ConfigError, CheckpointError: `run_dir` holds a run of another model, or one that cannot be resumed.
    """
    if Store(Path(config.run_dir) / CHECKPOINTS).latest() is None:
        return PlannedModel(config.source)
    from fsdp_shard.training import check_base_model, check_continues, find_step, model_source

    step = find_step("auto", config.run_dir)
    check_continues(config.adapter, step)
    note = check_base_model(config, step)
    return PlannedModel(model_source(config, step), step, note)
