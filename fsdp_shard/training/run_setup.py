"""Starting a training run: its process group, its run directory, and the step that it resumes from."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from fsdp_shard.checkpoint import BASE_MODEL, RUN_CONFIG, Location
from fsdp_shard.data import Dataset
from fsdp_shard.distributed import DistributedContext, init_distributed, is_restarted, run_on_main
from fsdp_shard.models import load_context
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.checkpoints.resume_report import describe_finished, describe_resume
from fsdp_shard.training.checkpoints.run_lock import run_lock
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.training.logging.mfu import utilization
from fsdp_shard.training.logging.run_log import RunLog
from fsdp_shard.training.logging.trackers import public_settings
from fsdp_shard.training.loop import TrainingRun
from fsdp_shard.training.model_identity import check_base_model
from fsdp_shard.training.model_origin import model_source
from fsdp_shard.training.sample_length import describe_lengths
from fsdp_shard.training.seeding import deterministic_algorithms, tf32_products
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import say


@dataclass(frozen=True)
class RunStart:
    """Where a run starts: the `source` of its model, and the directory of the `step` to resume from, if any.

    `note` says if the model that the run began from could not be compared with `model.path`.
    """

    source: Location
    step: Path | None
    note: str | None = None


@contextmanager
def start_run(config: FinetuneSettings) -> Iterator[tuple[DistributedContext, StopSignal]]:
    """Join the process group, lock the run directory and catch stop signals, until the block ends.

    Raises:
        ConfigError: On all ranks: another run uses the directory.
    """
    launch, shard = config.launch, config.shard
    with (
        deterministic_algorithms(config.train.deterministic),
        tf32_products(config.train.tf32),
        init_distributed(
            launch.device,
            shard.replicas,
            launch.timeout_seconds,
            tensor_parallel=shard.tensor_parallel,
            expert_parallel=shard.expert_parallel,
        ) as context,
        run_lock(config.run_dir, context),
        StopSignal() as stop,
    ):
        yield context, stop


def find_start(config: FinetuneSettings, context: DistributedContext) -> RunStart | None:
    """Find the step to resume from and verify it; a collective.

    Returns:
        Where the run starts, or None if it is already finished, which rank 0 says.

    Raises:
        ConfigError, CheckpointError: On all ranks: the run cannot be resumed.
    """
    remote = config.checkpoint.remote
    step = run_on_main(
        context, lambda: resume.find_step(config.resume, config.run_dir, remote, is_again=is_restarted())
    )
    note = run_on_main(context, lambda: check_base_model(config, step))
    if step is not None and run_on_main(context, lambda: resume.is_finished(step, config.run_dir, config.train)):
        run_on_main(context, lambda: say(describe_finished(config, step), sys.stderr))
        return None
    resume.verify_resumed(step, config.checkpoint, context)
    return RunStart(model_source(config, step), step, note)


def restore_state(
    start: RunStart, seed: int, data: Dataset, loaded: LoadedModel, optimizer: Optimizer, context: DistributedContext
) -> TrainerState:
    """Restore the optimizer and the progress of the run from the step to resume from, if any; a collective.

    Args:
        start: Where the run starts.
        seed: Seed of the run.
        data: The training data.
        loaded: The model.
        optimizer: Its optimizer; its state is filled.
        context: The ranks.

    Raises:
        ConfigError, CheckpointError: On all ranks: the step was saved with another seed, data or optimizer.
    """
    state = run_on_main(context, lambda: resume.open_trainer(start.step, seed, data.identity))
    if start.step is not None:
        resume.restore_optimizer(optimizer, loaded, start.step, context)
    return state


def open_log(config: FinetuneSettings, run: TrainingRun, start: RunStart, loaded: LoadedModel) -> RunLog:
    """Create the log of a run, with its settings for the trackers; open it as a context.

    A collective.

    Raises:
        CheckpointError: On all ranks: the step to resume from has no valid settings or position in the data.
    """
    opening = run_on_main(run.context, lambda: _opening(config, run, start))
    settings = public_settings(config) | {"train.steps": run.config.num_steps}
    mfu = utilization(loaded, config.shard.param_dtype, config.data.window_length, run.context)
    return RunLog(config.run_dir, run, start.step, settings, mfu, opening)


def _opening(config: FinetuneSettings, run: TrainingRun, start: RunStart) -> list[str]:
    """What a run says first: where it resumes, and how long its samples are."""
    lines = [] if start.step is None else [describe_resume(config, start.step, run)]
    lines += [] if start.note is None else [start.note]
    if (loss := run.functions.loss) is not None:
        name = config.loss or f"{loss.__module__}:{getattr(loss, '__qualname__', type(loss).__name__)}"
        lines.append(f"loss={name}, not the cross-entropy: model.chunked_loss is off, as it needs whole logits")
    context = load_context(start.source.directory, config.model.trust_remote_code)
    return [*lines, *describe_lengths(config.data, context)]


def run_files(config: FinetuneSettings, loaded: LoadedModel) -> dict[str, bytes]:
    """Return what each step records of its run: the settings, and the model that the run began from.

    Returns:
        File name -> content.
    """
    files = {RUN_CONFIG: config.to_yaml().encode()}
    # An adapter has its base among its own files.
    return files if loaded.base is None or loaded.adapter is not None else files | {BASE_MODEL: loaded.base.to_json()}
