"""Finds the step that a run resumes from, and restores model, optimizer and trainer state, all of it or nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    RUN_CONFIG,
    TRAINER,
    CheckpointConfig,
    RemoteStore,
    StepStore,
    read_manifest,
)
from fsdp_shard.data import Dataset
from fsdp_shard.distributed import DistributedContext, run_on_all, run_on_main
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.training.checkpoints.optimizer_groups import load_slots
from fsdp_shard.training.checkpoints.recorded_settings import read_settings, settings_changed_since
from fsdp_shard.training.config import FinetuneSettings, TrainConfig
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import RESULT, read_bounded

# Settings without effect on the training samples.
_NOT_TRAINED = ("data.workers ", "data.cache_dir ", "data.eval_path ", "data.eval_split ", "data.eval_sets ")


def find_step(resume: str, run_dir: str, remote: str | None = None, *, is_restart: bool = False) -> Path | None:
    """Find the step directory that a run resumes from.

    Args:
        resume: auto (the latest step in `run_dir` or, if later, the one on `remote`, which is downloaded), never, or
            the path or address of a run or a step.
        run_dir: The run directory.
        remote: Address of the remote store of the run.
        is_restart: The steps in `run_dir` belong to this run, from before its ranks were restarted, so it resumes from
            them regardless of `resume`.

    Returns:
        The step directory, or None if the run starts at the beginning.

    Raises:
        ConfigError: Steps would be overwritten.
        CheckpointError: The step cannot be resumed from.
        RemoteError: The remote store cannot be read.
    """
    store = StepStore(Path(run_dir) / checkpoint.CHECKPOINTS)
    _refuse_missing_manifests(store)
    remote_store = None if remote is None else RemoteStore(remote)
    if is_restart and store.latest() is not None:
        resume = "auto"
    if resume == "auto":
        if remote_store is not None:
            checkpoint.fetch_latest(remote_store, store)
        latest = store.latest()
        return None if latest is None else _check_complete(store.path(latest))
    found = None if resume == "never" else _find_other(resume)
    local, uploaded = store.latest(), None if remote_store is None else remote_store.latest()
    if local is not None and (found is None or found.resolve() != store.path(local).resolve()):
        raise _would_overwrite(resume, "run_dir", run_dir, local)
    content = None if found is None else read_bounded(found / MANIFEST, "metadata_bytes")
    if remote_store is not None and uploaded is not None and content != remote_store.manifest(uploaded):
        raise _would_overwrite(resume, "checkpoint.remote", remote_store.url, uploaded)
    return found


def _find_other(resume: str) -> Path:
    """The step directory at the path or address `resume` of a run or a step."""
    path = checkpoint.local_path(resume)
    if not path.exists():
        raise CheckpointError(f"resume={resume} does not exist; give a run directory, a step directory, auto or never.")
    for root in (path, path / checkpoint.CHECKPOINTS):
        _refuse_missing_manifests(StepStore(root))
    return _check_complete(checkpoint.latest_step_directory(path))


def _would_overwrite(resume: str, setting: str, value: str, step: int) -> ConfigError:
    return ConfigError(
        f"resume={resume} would eventually overwrite checkpoints: {setting}={value} already holds checkpoints up to "
        f"step {step}. Give another {setting}, or resume=auto to resume from there."
    )


def read_trainer(step_directory: Path) -> TrainerState:
    """Read the trainer state of a step; raise CheckpointError if it is damaged or belongs to another step."""
    path = step_directory / TRAINER
    state = TrainerState.from_json(read_bounded(path, "config_bytes"), str(path))
    manifest = read_manifest(step_directory)
    if manifest is not None and manifest.step != state.step:
        raise CheckpointError(
            f"{path} is of step {state.step}, but {MANIFEST} of step {manifest.step}: they are of different saves."
        )
    return state


def initial_state(step_directory: Path | None, config: FinetuneSettings, data: str) -> TrainerState:
    """The trainer state of a step, or the initial one.

    Args:
        step_directory: The step to resume from, if any.
        config: The settings of the run.
        data: The identity of its data.

    Raises:
        ConfigError: The step has another seed or other data.
    """
    if step_directory is None:
        return TrainerState(seed=config.seed, data=data)
    state = read_trainer(step_directory)
    state.check_continues(config.seed, data, str(step_directory), lambda: _changed_data(config, step_directory))
    return state


def planned_training(
    data: Dataset, config: FinetuneSettings, step_directory: Path | None
) -> tuple[TrainConfig, TrainerState]:
    """The loop settings with `epochs` as a number of steps, and the trainer state, that a run would begin with.

    For work before the run is created, so that the errors come first.

    Raises:
        ConfigError: Other settings contradict the number of steps, or the step has another seed or other data.
    """
    state = initial_state(step_directory, config, data.identity)
    num_samples = None if data.source_names else data.num_samples
    return config.train.for_data(num_samples, state.step, state.num_samples), state


def _changed_data(config: FinetuneSettings, step_directory: Path) -> list[str]:
    changes = settings_changed_since(config, step_directory) or []
    return [change for change in changes if change.startswith("data.") and not change.startswith(_NOT_TRAINED)]


def check_same_objective(step_directory: Path | None, objective: ObjectiveConfig, loss: str | None) -> None:
    """Raise ConfigError if a step was trained with another objective or `loss`, whose values cannot be compared."""
    settings = None if step_directory is None else read_settings(step_directory / RUN_CONFIG)
    if settings is None:
        return
    for name, before, now in _loss_settings(settings, objective, loss):
        if before != now:
            raise ConfigError(
                f"{step_directory} was trained with {name}={before}, so a run with {name}={now} cannot resume from it: "
                f"best step, patience and curves would mix two losses. Start a new run from its weights, with "
                f"model.path and another run_dir."
            )


def _loss_settings(
    recorded: Mapping[str, Any], objective: ObjectiveConfig, loss: str | None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, recorded value, value now) of each setting that defines the loss; the objective comes first."""
    yield "objective", recorded["defaults"].get("objective", "sft"), objective.name
    values = recorded.get("objective") or {}
    for name, value in vars(objective).items():
        if name not in objective.of_computation:
            yield f"objective.{name}", values.get(name, value), value
    yield "loss", recorded.get("loss") or "null", loss or "null"


def is_finished(step_directory: Path | None, run_dir: str, config: TrainConfig) -> bool:
    """Whether the run in `run_dir` has completed and written its result."""
    if step_directory is None or not (Path(run_dir) / RESULT).exists():
        return False
    state = read_trainer(step_directory)
    if state.stops_early(config.patience):
        return True
    if config.epochs is not None and state.samples_per_epoch is None:  # an older checkpoint: only the data has it
        return False
    return state.step >= config.for_data(state.samples_per_epoch, state.step, state.num_samples).num_steps


def check_optimizer(step_directory: Path | None, optim: OptimConfig) -> None:
    """Raise CheckpointError if the run would resume from a step that lacks the state of its optimizer `optim`."""
    if step_directory is None or _has_optimizer(step_directory):
        return
    if optim.keeps_state and _has_updated(step_directory):
        raise CheckpointError(
            f"{step_directory} cannot be resumed from: it has no {OPTIMIZER}/. It was saved with "
            f"checkpoint.optimizer=false, is older than checkpoint.keep_optimizer_last, or its optimizer keeps no "
            f"state. To train from its weights only, give it as model.path."
        )


def restore_optimizer(
    optimizer: Optimizer, loaded: LoadedModel, step_directory: Path, context: DistributedContext
) -> None:
    """Fill the optimizer's state from a step of any layout, wrapper and number of ranks; a collective.

    The step must have exactly the states that this optimizer keeps, except for parameters that never had a gradient,
    such as the image encoder of a model that saw only text. There are no states if every step so far was skipped, or
    if the optimizer keeps none, which `check_optimizer` has found before.

    Args:
        optimizer: The optimizer, which has not stepped yet.
        loaded: The model.
        step_directory: The step.
        context: The ranks.

    Raises:
        CheckpointError: A state is missing, unexpected, or has another shape.
    """
    if not run_on_main(context, lambda: _has_updated(step_directory) and _has_optimizer(step_directory)):
        return
    shards = loaded.model.local_shards()
    with run_on_all(context, lambda: checkpoint.open_checkpoint(step_directory / OPTIMIZER)) as index:
        used = [shards[name].tensor for name in checkpoint.used_parameters(index.names, shards)]
        optimizer.state.clear()  # some create it in their constructor, even for parameters that never had a gradient
        load_slots(
            index,
            index.names,
            lambda _: checkpoint.create_state(optimizer, used),
            lambda: checkpoint.optimizer_shards(optimizer, shards),
            context,
        )


def verify_resumed(
    step_directory: Path | None, optim: OptimConfig, config: CheckpointConfig, context: DistributedContext
) -> None:
    """Check that a step has its optimizer state, and compare all its bytes with their digests, a part on each rank.

    A collective.

    Args:
        step_directory: The step that the run resumes from, if any.
        optim: The optimizer settings of the run.
        config: With `verify_on_resume=false`, bytes are not compared.
        context: The ranks.

    Raises:
        CheckpointError: The step is damaged or incomplete.
    """
    run_on_main(context, lambda: check_optimizer(step_directory, optim))
    if step_directory is not None and config.verify_on_resume:
        with _with_advice(step_directory):
            run_on_all(context, lambda: checkpoint.check_content(step_directory, context.rank, context.world_size))


@contextmanager
def _with_advice(step_directory: Path) -> Iterator[None]:
    """Add advice on how to continue without a damaged step."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Delete {step_directory} to resume from an earlier step, or to start at the beginning."
        ) from error


def _has_optimizer(step_directory: Path) -> bool:
    return checkpoint.has_optimizer(checkpoint.check_files(step_directory))


def _has_updated(step_directory: Path) -> bool:
    """Whether any step changed the weights; before that, an optimizer has no state."""
    state = read_trainer(step_directory)
    return state.num_skipped < state.step


def _refuse_missing_manifests(store: StepStore) -> None:
    """Raise an error for a later step without a manifest: the manifest is written before the step gets its name."""
    latest = store.latest()
    for entry in sorted(store.root.iterdir()) if store.root.is_dir() else ():
        step = checkpoint.parse_step(entry.name)
        if step is not None and (latest is None or step > latest) and not checkpoint.has_file(entry, MANIFEST):
            raise CheckpointError(
                f"{entry} has no {MANIFEST}: the checkpoint is damaged. Delete it to resume from an earlier one, or to "
                "start at the beginning."
            )


def _check_complete(directory: Path) -> Path:
    """Reject a step from which only part of the state would be restored: training would silently differ."""
    for name, what in ((MANIFEST, "the list of its files"), (TRAINER, "the trainer state")):
        if not checkpoint.has_file(directory, name):
            raise CheckpointError(
                f"{directory} cannot be resumed from: it has no {name}, which is {what}. To train from its weights "
                f"only, give it as model.path."
            )
    with _with_advice(directory):
        files = checkpoint.check_files(directory).files
    if TRAINER not in files:
        raise CheckpointError(f"{directory} cannot be resumed from: its {MANIFEST} does not list {TRAINER}.")
    return directory
