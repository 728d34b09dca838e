"""Determines `data.sequence_length` of a run: as given, as in the step to resume from, or by the model."""

from pathlib import Path

from fsdp_shard import models
from fsdp_shard.checkpoint import CHECKPOINTS, CONFIG_FILE, RUN_CONFIG
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import CheckpointError
from fsdp_shard.training.checkpoints.recorded_settings import read_settings


def settle_run_length(
    data: models.LengthSettings, step_directory: Path | None, context_length: models.ContextLength
) -> int:
    """Set `data.sequence_length`, if it is null, to that of the step to resume from, or as `settle_length` does.

    Args:
        data: The data settings.
        step_directory: The step to resume from, if any.
        context_length: The context length of the model.

    Returns:
        The length.

    Raises:
        CheckpointError: The step does not record its length.
        ConfigError: The length exceeds the model's positions.
    """
    if data.sequence_length is None and step_directory is not None:
        data.sequence_length = _recorded_length(step_directory)
    return models.settle_length(data, context_length)


def describe_lengths(data: DataConfig, context_length: models.ContextLength) -> list[str]:
    """Describe the lengths of samples and of the context; raises ConfigError if the model has no such positions."""
    lines = [context_length.describe(data.window_length)]
    if data.target_length is not None:
        lines.append(context_length.describe(data.target_length, "data.target_length"))
    return lines


def _recorded_length(step_directory: Path) -> int:
    """Return the length that a step was trained with; for old versions, config.yaml of its run records it."""
    settings = read_settings(step_directory / RUN_CONFIG)
    if settings is None and step_directory.parent.name == CHECKPOINTS:
        settings = read_settings(step_directory.parent.parent / CONFIG_FILE)
    length = ((settings or {}).get("data") or {}).get("sequence_length")
    if not isinstance(length, int):
        raise CheckpointError(
            f"{step_directory} does not record the length of the samples that it was trained on, as an earlier version "
            f"saved it; set data.sequence_length to that of its run, which was 1024 unless it was given."
        )
    return length
