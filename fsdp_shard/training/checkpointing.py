"""What of a run is saved and how it is found again: the state of model, optimizer and trainer, as one step directory.

Whether and when to save is the recipe's; how bytes lie on the disk is `checkpoint`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.base import CheckpointConfig
from fsdp_shard.checkpoint.files import has_file
from fsdp_shard.checkpoint.index import open_checkpoint
from fsdp_shard.checkpoint.manifest import MANIFEST
from fsdp_shard.checkpoint.optimizer import check_slots, create_state, optimizer_shards
from fsdp_shard.checkpoint.state import OPTIMIZER, TRAINER, RunState, load_shards, save_step
from fsdp_shard.checkpoint.store import CHECKPOINTS, Store
from fsdp_shard.checkpoint.store import resolve as resolve_step
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.models import ModelSource
from fsdp_shard.results import RESULT
from fsdp_shard.sizes import parse_size
from fsdp_shard.training.base import TrainConfig
from fsdp_shard.training.schedule import is_due
from fsdp_shard.training.setup import LoadedModel, side_files
from fsdp_shard.training.state import TrainerState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fsdp_shard.distributed import DistributedContext


def find_step(resume: str, run_dir: str) -> Path | None:
    """The step directory that a run goes on from, or None where it begins anew.

    `resume` is auto (the latest step in `run_dir`, if there is one), never, or the path of a run or a step. Raises
    ConfigError when steps in `run_dir` would be written over, CheckpointError when a step cannot be resumed from.
    """
    store = Store(Path(run_dir) / CHECKPOINTS)
    latest = store.latest()
    if resume == "never":
        if latest is not None:
            raise ConfigError(
                f"resume=never, but run_dir={run_dir} already holds checkpoints up to step {latest}; give another "
                f"run_dir, or resume=auto to go on from there."
            )
        return None
    if resume == "auto":
        return None if latest is None else _check_complete(store.path(latest))
    if not Path(resume).exists():
        raise CheckpointError(f"resume={resume} does not exist; give a run directory, a step directory, auto or never.")
    found = _check_complete(resolve_step(Path(resume)))
    if latest is not None and found.resolve() != store.path(latest).resolve():
        raise ConfigError(
            f"resume={resume} would go on beside the checkpoints that run_dir={run_dir} already holds, up to step "
            f"{latest}, and in the end write over them; give another run_dir."
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


def restore_optimizer(
    optimizer: Optimizer, loaded: LoadedModel, step_directory: Path, context: DistributedContext
) -> None:
    """Fill the optimizer's state from a step directory of any layout, wrapper and number of ranks; a collective.

    Every state that this optimizer keeps must be there and no other, or CheckpointError on all ranks.
    """
    create_state(optimizer)
    states = optimizer_shards(optimizer, loaded.model.local_shards())
    names = set().union(*context.all_gather_object(set(states)))
    with context.together(lambda: open_checkpoint(step_directory / OPTIMIZER)) as index:
        context.together(lambda: check_slots(index, states, names))
        context.together(lambda: load_shards(index, states))


@dataclass(frozen=True)
class Saver:
    """Saves steps of one run. `side_files` are needed on rank 0 only."""

    context: DistributedContext
    store: Store
    config: CheckpointConfig
    loaded: LoadedModel
    optimizer: Optimizer
    side_files: Mapping[str, bytes]

    def is_due(self, state: TrainerState, num_steps: int) -> bool:
        """Whether the settings ask for a save where the run stands."""
        every_nth = is_due(state.step, self.config.every, num_steps)
        return every_nth or (self.config.save_best and state.is_best)

    def save(self, state: TrainerState) -> Path:
        """Commit a step directory and delete what `checkpoint.keep_*` no longer keep; a collective."""
        shards = self.loaded.model.local_shards()
        optimizer = optimizer_shards(self.optimizer, shards) if self.config.optimizer else {}
        whole = RunState(shards, self.loaded.aliases, optimizer, json.loads(state.to_json()), self.side_files)
        gathered = self.config.layout == "gathered"
        size = parse_size(self.config.max_shard_size, "checkpoint.max_shard_size") if gathered else None
        directory = save_step(
            self.context, self.store, state.step, whole, layout=self.config.layout, max_shard_bytes=size
        )
        self.context.together(lambda: self._tidy(state))
        return directory

    def _tidy(self, state: TrainerState) -> None:
        if not self.context.is_main:
            return
        if state.is_best:
            self._replace_best(state.step)
        if self.config.keep_last is not None:
            self.store.prune(self.config.keep_last, self.config.keep_every)

    def _replace_best(self, step: int) -> None:
        """Point to a better step, and let the one before go if it was saved for being the best only."""
        before, every = self.store.best(), self.config.every
        self.store.set_best(step)
        if self.config.save_best and before not in (None, step) and not (every and before % every == 0):
            self.store.delete(before)


def open_saver(
    run_dir: str,
    config: CheckpointConfig,
    context: DistributedContext,
    loaded: LoadedModel,
    optimizer: Optimizer,
    source: ModelSource,
    dtype: str,
) -> Saver:
    """The saver of the run in `run_dir`, after removing what an interrupted save may have left there."""
    store = Store(Path(run_dir) / CHECKPOINTS)
    context.decide(store.clean_leftovers)
    beside = context.decide(lambda: side_files(source, dtype))
    return Saver(context, store, config, loaded, optimizer, beside)


def _check_complete(directory: Path) -> Path:
    """Refuse a step from which not everything would be restored: what is missing would drift in silence."""
    for name, what in ((MANIFEST, "the list of its files"), (TRAINER, "the trainer's state")):
        if not has_file(directory, name):
            raise CheckpointError(
                f"{directory} cannot be resumed from: it has no {name}, which is {what}. To train from its weights "
                f"only, give it as model.path."
            )
    if not (directory / OPTIMIZER).is_dir():
        raise CheckpointError(
            f"{directory} cannot be resumed from: it has no {OPTIMIZER}/, as it was saved with "
            f"checkpoint.optimizer=false. To train from its weights only, give it as model.path."
        )
    return directory
