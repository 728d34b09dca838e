"""What a resume, and a run that is finished, say: which step, which settings have changed, where they are in the data.

`run_config.yaml` of a step has the settings that made it, without secrets, as config.yaml of the run directory.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field
from math import prod
from pathlib import Path
from typing import Any

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import RUN_CONFIG
from fsdp_shard.training.checkpoints.recorded_settings import parse_settings, read_settings
from fsdp_shard.training.checkpoints.resume import read_trainer
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.loop import TrainingRun
from fsdp_shard.utils import format_count, in_yaml, walk

_WHERE = ("run_dir", "resume")  # of the run, and no setting of how it trains
_ABSENT = "not set"


def describe_resume(config: FinetuneSettings, step_directory: Path, run: TrainingRun) -> str:
    """Say in one line where a run resumes, and which settings differ from those that made its step."""
    state, num_steps = run.state, run.config.num_steps
    at = f"resumed from {step_directory}, step {state.step:,} of {num_steps:,}"
    parts = [at, format_count(state.num_samples, "sample")]
    if progress := run.dataset.describe_progress(state.num_samples, state.place):
        parts.append(progress)
    if run.is_over:
        parts.append("nothing is left to train")
    changes = changed_settings(config, step_directory)
    before = prod(_manifest_mesh(step_directory).values())
    if before != run.context.world_size and not any(change.startswith("launch.") for change in changes or []):
        changes = [*(changes or []), f"ranks {before} -> {run.context.world_size}"]  # those of torchrun or srun
    if changes:
        said = f"changed: {', '.join(changes)}"
    elif changes is None:
        said = f"changed settings are not known, as the step has no {RUN_CONFIG}"
    else:
        said = "same settings"
    return f"{', '.join(parts)}; {said}"


def describe_finished(config: FinetuneSettings, step_directory: Path) -> str:
    """Say in one line that a run is finished, with what, what of the settings is ignored, and how it could go on."""
    state, train = read_trainer(step_directory), config.train
    is_early = state.stops_early(train.patience)
    how = f"stopped early (train.patience={train.patience}) after" if is_early else "is finished after"
    line = (
        f"run_dir={config.run_dir} {how} step {state.step:,}, which is in {step_directory}: nothing is left to train."
    )
    if changes := changed_settings(config, step_directory):
        line += f" Settings that have changed since have no effect: {', '.join(changes)}."
    elif train.epochs is None and train.num_steps < state.step:
        line += f" It has more than train.steps={train.num_steps:,} already."
    longer = f"train.steps to more than {state.step:,}"
    if is_early:
        longer = f"train.patience to more than {state.num_stale}"
    elif train.epochs is not None:
        longer = f"train.epochs to more than {state.epoch or train.epochs:.4g}"
    return f"{line} To go on, set {longer}; for a new run, give another run_dir."


def changed_settings(config: FinetuneSettings, step_directory: Path) -> list[str] | None:
    """Return `name before -> now` of each setting that differs from those that made a step; see `changed_values`."""
    changes = changed_values(config, step_directory)
    return None if changes is None else [f"{name} {was} -> {value}" for name, (was, value) in changes.items()]


def changed_values(config: FinetuneSettings, step_directory: Path) -> dict[str, tuple[str, str]] | None:
    """Return the values, before and now, of each setting that differs from those that made a step.

    Args:
        config: The settings now.
        step_directory: The step.

    Returns:
        The changes by name, in the order of the settings; None if the step does not record any settings.

    Raises:
        CheckpointError: run_config.yaml is damaged.
    """
    if (before := read_settings(step_directory / RUN_CONFIG)) is None:
        return None
    now = parse_settings(config.to_yaml().encode(), "the config")
    names = [
        *now["defaults"],
        *(name for name, field, value in walk(config) if not _is_new(name, field, value, before)),
    ]
    values = {name: (_value(before, name), _value(now, name)) for name in names if name not in _WHERE}
    return {name: (was, value) for name, (was, value) in values.items() if was != value}


def _is_new(name: str, field: Field[Any], value: Any, before: Mapping[str, Any]) -> bool:
    """Whether a setting is not among those before, as those of another wrapper, and has its default."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return _value(before, name) == _ABSENT and value == default


def _value(document: Mapping[str, Any], name: str) -> str:
    """The setting of this dotted name, or the choice of the group of this name, as YAML has it."""
    if name in document["defaults"]:
        return str(document["defaults"][name])
    found: Any = document
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            return _ABSENT
        found = found[key]
    return "null" if found is None else in_yaml(found)


def _manifest_mesh(step_directory: Path) -> Mapping[str, int]:
    manifest = checkpoint.read_manifest(step_directory)
    return {} if manifest is None else manifest.mesh
