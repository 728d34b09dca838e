"""How a saved step of a run is found again and restored: model, optimizer and trainer, all of it or nothing.

Saving is `saving`'s; how bytes lie on the disk is `checkpoint`'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    OPTIMIZER,
    TRAINER,
    CheckpointConfig,
    RemoteStore,
    Store,
    check_content,
    check_files,
    check_slots,
    create_state,
    fetch_latest,
    has_file,
    has_optimizer,
    is_remote,
    load_shards,
    local_copy,
    open_checkpoint,
    optimizer_shards,
    parse_step,
    resolve as resolve_step,
    used_parameters,
)
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.model_setup import LoadedModel
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import RESULT

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fsdp_shard.distributed import DistributedContext


def find_step(resume: str, run_dir: str, remote: str | None = None, *, is_again: bool = False) -> Path | None:
    """The step directory that a run goes on from, or None where it begins anew.

    `resume` is auto (the latest step in `run_dir`, if there is one), never, or the path of a run or a step. Where
    `remote` has a later step than `run_dir`, auto downloads it. With `is_again` the steps in `run_dir` are this run's
    own, from before its ranks were started again, and it goes on from them whatever it began with.

    Raises ConfigError when steps would be written over, CheckpointError when a step cannot be resumed from,
    RemoteError when a remote store cannot be read.
    """
    store = Store(Path(run_dir) / CHECKPOINTS)
    _refuse_nameless(store, store.latest())
    above = None if remote is None else RemoteStore(remote)
    if is_again and store.latest() is not None:
        resume = "auto"
    if resume == "auto" and above is not None:
        fetch_latest(above, store)
    latest = store.latest()
    if resume == "auto":
        return None if latest is None else _check_complete(store.path(latest))
    held = None if above is None else above.latest()
    if resume == "never":
        for there, place, name in (
            (latest, f"run_dir={run_dir}", "run_dir"),
            (held, f"checkpoint.remote={remote}", "checkpoint.remote"),
        ):
            if there is not None:
                raise ConfigError(
                    f"resume=never, but {place} already holds checkpoints up to step {there}; give another {name}, or "
                    f"resume=auto to go on from there."
                )
        return None
    resume = str(local_copy(resume)) if is_remote(resume) else os.path.expanduser(resume)
    if not Path(resume).exists():
        raise CheckpointError(f"resume={resume} does not exist; give a run directory, a step directory, auto or never.")
    for root in (Path(resume), Path(resume) / CHECKPOINTS):
        _refuse_nameless(Store(root), Store(root).latest())
    found = _check_complete(resolve_step(Path(resume)))
    if latest is not None and found.resolve() != store.path(latest).resolve():
        raise ConfigError(
            f"resume={resume} would go on beside the checkpoints that run_dir={run_dir} already holds, up to step "
            f"{latest}, and in the end write over them; give another run_dir."
        )
    if above is not None and held is not None and above.manifest(held) != (found / MANIFEST).read_bytes():
        raise ConfigError(
            f"resume={resume} would go on beside the checkpoints that checkpoint.remote={remote} already holds, up to "
            f"step {held}; give another checkpoint.remote."
        )
    return found


def read_trainer(step_directory: Path) -> TrainerState:
    """The trainer's state in a step directory; CheckpointError when it is not what was written."""
    path = step_directory / TRAINER
    return TrainerState.from_json(path.read_text(encoding="utf-8"), str(path))


def open_trainer(step_directory: Path | None, seed: int, data: str) -> TrainerState:
    """Where the run stands: as the step says, or at the beginning. Raises ConfigError when seed or data are others."""
    if step_directory is None:
        return TrainerState(seed=seed, data=data)
    state = read_trainer(step_directory)
    state.check_continues(seed, data)
    return state


def is_finished(step_directory: Path | None, run_dir: str, config: TrainConfig) -> bool:
    """Whether the run in `run_dir` has come to its end and written its result: then there is nothing to do."""
    if step_directory is None or not (Path(run_dir) / RESULT).exists():
        return False
    state = read_trainer(step_directory)
    return state.step >= config.steps or state.stops_early(config.patience)


def check_optimizer(step_directory: Path | None) -> None:
    """Raise CheckpointError where a run that is not finished would go on from a step without optimizer state."""
    if step_directory is None or has_optimizer(check_files(step_directory)):
        return
    if _has_updated(step_directory):
        raise CheckpointError(
            f"{step_directory} cannot be resumed from: it has no {OPTIMIZER}/, as it was saved with "
            f"checkpoint.optimizer=false or is older than checkpoint.keep_optimizer_last. To train from its weights "
            f"only, give it as model.path."
        )


def restore_optimizer(
    optimizer: Optimizer, loaded: LoadedModel, step_directory: Path, context: DistributedContext
) -> None:
    """Fill the optimizer's state from a step directory of any layout, wrapper and number of ranks; a collective.

    Every state that this optimizer keeps must be there and no other, or CheckpointError on all ranks. Only of a
    parameter that never had a gradient, such as a part of the model that sees pictures, there is none, and none at all
    where every step so far was skipped.
    """
    if not context.decide(lambda: _has_updated(step_directory)):
        return
    shards = loaded.model.local_shards()
    with context.together(lambda: open_checkpoint(step_directory / OPTIMIZER)) as index:
        create_state(optimizer, [shards[name].tensor for name in used_parameters(index, shards)])
        states = optimizer_shards(optimizer, shards)
        names = set().union(*context.all_gather_object(set(states)))
        context.together(lambda: check_slots(index, states, names))
        context.together(lambda: load_shards(index, states))


def verify_resumed(step_directory: Path | None, config: CheckpointConfig, context: DistributedContext) -> None:
    """Compare every byte of the step to go on from with its digests, each rank a part; CheckpointError on all ranks.

    Its optimizer state must be there.
    """
    context.together(lambda: check_optimizer(step_directory))
    if step_directory is not None and config.verify_on_resume:
        context.together(lambda: check_content(step_directory, context.rank, context.world_size))


def _has_updated(step_directory: Path) -> bool:
    """Whether any step changed the weights: before that an optimizer has no state."""
    state = read_trainer(step_directory)
    return state.num_skipped < state.step


def _refuse_nameless(store: Store, latest: int | None) -> None:
    """Refuse to pass over a newer step that has lost its manifest: steps get their name together with it."""
    for entry in sorted(store.root.iterdir()) if store.root.is_dir() else ():
        step = parse_step(entry.name)
        if step is not None and (latest is None or step > latest) and not has_file(entry, MANIFEST):
            raise CheckpointError(
                f"{entry} has no {MANIFEST}, which it was given with its name: the checkpoint is damaged. Remove it to "
                "go on from an earlier one, or to begin anew."
            )


def _check_complete(directory: Path) -> Path:
    """Refuse a step from which not everything would be restored: what is missing would drift in silence."""
    for name, what in ((MANIFEST, "the list of its files"), (TRAINER, "the trainer's state")):
        if not has_file(directory, name):
            raise CheckpointError(
                f"{directory} cannot be resumed from: it has no {name}, which is {what}. To train from its weights "
                f"only, give it as model.path."
            )
    if TRAINER not in check_files(directory).files:
        raise CheckpointError(f"{directory} cannot be resumed from: its {MANIFEST} does not list {TRAINER}.")
    return directory
