"""The report of a resume or of a finished run: its step, the changed settings, and the position in the data.

A step's `run_config.yaml` records the settings that made it, without secrets, like config.yaml in the run directory.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import RUN_CONFIG
from fsdp_shard.training.checkpoints.recorded_settings import settings_changed_since
from fsdp_shard.training.checkpoints.resume import read_trainer
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.loop import TrainingRun
from fsdp_shard.utils import format_count


def describe_resume(config: FinetuneSettings, step_directory: Path, run: TrainingRun) -> str:
    """Describe in one line where a run resumes, and which settings differ from those that made its step."""
    state, num_steps = run.state, run.config.num_steps
    at = f"resumed from {step_directory}, step {state.step:,} of {num_steps:,}"
    parts = [at, format_count(state.num_samples, "sample")]
    if progress := run.dataset.describe_progress(state.num_samples, state.dataset_state):
        parts.append(progress)
    if run.is_over:
        parts.append("nothing is left to train")
    changes = settings_changed_since(config, step_directory)
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
    """Describe in one line a finished run's result, the settings that are ignored, and how the run could continue."""
    state, train = read_trainer(step_directory), config.train
    is_early = state.stops_early(train.patience)
    how = f"stopped early (train.patience={train.patience}) after" if is_early else "is finished after"
    line = (
        f"run_dir={config.run_dir} {how} step {state.step:,}, which is in {step_directory}: nothing is left to train."
    )
    if changes := settings_changed_since(config, step_directory):
        line += f" Settings that have changed since have no effect: {', '.join(changes)}."
    elif train.epochs is None and train.num_steps < state.step:
        line += f" It has more than train.steps={train.num_steps:,} already."
    longer = f"train.steps to more than {state.step:,}"
    if is_early:
        longer = f"train.patience to more than {state.num_stale}"
    elif train.epochs is not None:
        longer = f"train.epochs to more than {state.epoch or train.epochs:.4g}"
    return f"{line} To continue, set {longer}; for a new run, give another run_dir."


def _manifest_mesh(step_directory: Path) -> Mapping[str, int]:
    manifest = checkpoint.read_manifest(step_directory)
    return {} if manifest is None else manifest.mesh
