"""Checks that `model.path` is the model that the run to resume began from, as recorded in its step."""

import os
from collections.abc import Sequence
from pathlib import Path

from fsdp_shard import checkpoint
from fsdp_shard.errors import CheckpointError, InputError
from fsdp_shard.models import ModelConfig
from fsdp_shard.training.config import ModelSettings
from fsdp_shard.training.objectives.objective import ReferenceConfig


def model_name(config: ModelConfig) -> str:
    """The model name that steps record: its absolute path, or its hub id or address, including the GGUF file."""
    path = os.path.expanduser(config.path)
    name = os.path.abspath(path) if os.path.exists(path) else config.path
    return name if config.gguf_file is None else os.path.join(name, config.gguf_file)


def check_base_model(config: ModelSettings, step_directory: Path | None) -> str | None:
    """Compare `model.path` with the model that the run to resume began from, by the first elements of its tensors.

    Args:
        config: The settings of the run.
        step_directory: The step to resume from, if any.

    Returns:
        A line to print if the models could not be compared, or if only the config changed and the run does not use it;
        the run resumes nevertheless.

    Raises:
        CheckpointError: It is another model, or there is none; or its config has changed and the run uses it.
    """
    if step_directory is None:
        return None
    recorded = checkpoint.read_base_model(step_directory)
    if recorded is None:
        return (
            f"{step_directory} does not record the model that its run began from, as an earlier version saved it: "
            f"model.path={config.model.path} was not compared with it"
        )
    # A deleted model has the recorded name, but the path no longer exists. A hub model is not downloaded for the
    # comparison.
    names = {model_name(config.model), os.path.abspath(os.path.expanduser(model_name(config.model)))}
    is_unchanged = recorded.path in names
    given = config.model
    try:
        source = checkpoint.locate(given.path, given.gguf_file, fetch_weights=False) if is_unchanged else config.source
        with source.model_index as index:
            is_same = checkpoint.is_base_model(index, recorded, source.expected_config_directory)
        changes = checkpoint.config_changes(recorded, source.expected_config_directory)
    except InputError as error:
        if is_unchanged:
            return f"model.path={given.path} was not compared with the start of the run, as it is gone: {error}"
        raise CheckpointError(
            f"{step_directory} was trained on {recorded.path}, and model.path={given.path} cannot be compared with "
            f"that: {error} Set model.path={recorded.path}, or start a new run in another run_dir."
        ) from error
    if not is_same:
        raise other_model(step_directory, recorded, given.path)
    if not changes:
        return None
    if isinstance(config.objective, ReferenceConfig) or checkpoint.is_adapter(step_directory):
        raise other_config(step_directory, recorded, given.path, changes)
    return (
        f"config.json of model.path={given.path} has changed since the run began from it ({', '.join(changes)}), and "
        f"has no effect: the config of {step_directory} is used"
    )


def other_config(
    step_directory: Path, recorded: checkpoint.BaseModel, path: str, changes: Sequence[str]
) -> CheckpointError:
    """Return the error for a model at `path` with the recorded weights but another config."""
    return CheckpointError(
        f"{step_directory} was trained on {recorded.path}, but config.json of model.path={path} differs from its "
        f"config.json: {', '.join(changes)}. Restore these values, or start a new run in another run_dir."
    )


def other_model(step_directory: Path, recorded: checkpoint.BaseModel, path: str) -> CheckpointError:
    """Return the error for a model at `path` that is not the recorded one."""
    return CheckpointError(
        f"{step_directory} was trained on {recorded.path}, but model.path={path} holds other weights (names, dtypes, "
        f"shapes or values differ). Give the model that it was trained on, or start a new run in another run_dir."
    )
