"""Saving steps of a run, in the background or not: when, one at a time, and what happens when a save fails.

A save in the background is settled before the optimizer changes what it has still to read. All ranks agree on its
outcome, in the main thread, before any acts on it: `poll` after a step, `finish` before the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from fsdp_shard.checkpoint import CHECKPOINTS, CheckpointConfig, RunState, Staging, Store, optimizer_shards
from fsdp_shard.distributed import DistributedContext, run_on_all, run_on_main
from fsdp_shard.errors import FsdpShardError, Interrupted, RemoteError, SaveError, StorageError
from fsdp_shard.training.checkpoints.background_save import BackgroundSave
from fsdp_shard.training.checkpoints.step_committer import SavedStep, StepCommitter
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.training.optim.lr_schedule import is_due
from fsdp_shard.training.trainer_state import TrainerState

if TYPE_CHECKING:
    from torch.optim import Optimizer

_GRACE_SECONDS = 10.0  # for a save to end when another rank may be lost


class SaveLog(Protocol):
    """What reports saves; called on all ranks alike."""

    def note(self, lines: str) -> None:
        """Report something in words."""

    def saved(self, checkpoint: Path) -> None:
        """Report a committed step."""


@dataclass(frozen=True)
class RunObjects:
    """What a save reads its state from. `model_files` (config, tokenizer) are needed on rank 0 only."""

    loaded: LoadedModel
    optimizer: Optimizer
    model_files: Mapping[str, bytes]

    def state(self, trainer: TrainerState, *, with_optimizer: bool) -> RunState:
        """This rank's part of what a step directory holds."""
        shards = self.loaded.model.local_shards()
        states = optimizer_shards(self.optimizer, shards) if with_optimizer else {}
        document = json.loads(trainer.to_json())
        if (adapter := self.loaded.adapter) is not None:
            return RunState(adapter.stored(shards), {}, states, document, self.model_files, adapter.FILE)
        return RunState(shards, self.loaded.aliases, states, document, self.model_files)


class Saver:
    """Saves steps of one run; every method is a collective.

    A context manager: leaving it by an error waits for a save in the background, unless a second signal asks to end at
    once.
    """

    def __init__(
        self,
        context: DistributedContext,
        config: CheckpointConfig,
        objects: RunObjects,
        committer: StepCommitter,
        log: SaveLog,
    ) -> None:
        self._context, self._config, self._log = context, config, log
        self._objects, self._committer = objects, committer
        self._staging = Staging()
        self._running: BackgroundSave[SavedStep] | None = None
        self._failed: StorageError | None = None
        self._num_failures = 0
        self._hook = objects.optimizer.register_step_pre_hook(lambda *_: self._settle())

    def is_due(self, state: TrainerState, num_steps: int) -> bool:
        """Whether the settings ask for a save after the step of `state`, in a run of `num_steps` steps."""
        return is_due(state.step, self._config.every, num_steps) or (self._config.save_best and state.is_best)

    def save(self, state: TrainerState) -> None:
        """Save the current state, after waiting for the previous save.

        Raises:
            SaveError: The save failed, or the previous one did, and the run has to stop for it.
        """
        self.wait()
        step, is_best = state.step, state.is_best
        run_state = self._objects.state(state, with_optimizer=self._config.optimizer)
        if not self._config.asynchronous:
            self._conclude(step, lambda: self._committer.commit(step, run_state, is_best=is_best))
            return
        staged, copy = self._staging.stage(run_state)
        self._log.note(f"saving step {step} in the background")
        self._running = BackgroundSave(step, copy, lambda: self._committer.commit(step, staged, is_best=is_best))

    def note_best(self, state: TrainerState) -> None:
        """Mark the step that the run resumed from as the best, if the evaluation that it still owed says so."""
        if state.is_best:
            run_on_main(self._context, lambda: self._committer.mark_best(state.step))

    def poll(self) -> None:
        """Conclude the save in the background, if it has ended on all ranks; to be called after each step.

        Raises:
            SaveError: The save failed, and the run has to stop for it.
        """
        if self._running is not None and self._context.all_reduce([float(self._running.is_done)], "min")[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, and log its outcome or raise its error if the run has to stop for it."""
        if self._running is not None:
            running, self._running = self._running, None
            self._conclude(running.step, running.result)

    def finish(self) -> None:
        """Wait for the save in the background, and raise the error of the last save of the run if it failed."""
        self.wait()
        if self._failed is not None:
            raise self._failed

    def _conclude(self, step: int, result: Callable[[], SavedStep]) -> None:
        """Act on the outcome of a save, as all ranks agree on it."""
        try:
            saved = run_on_all(self._context, lambda: self._checked(step, result))
        except StorageError as error:
            self._num_failures += 1
            what = "uploaded, and is in the run directory only" if isinstance(error, RemoteError) else "saved"
            self._failed = type(error)(f"Step {step} could not be {what}. {error} Earlier checkpoints are kept.")
            if self._num_failures >= self._config.max_failures:
                raise self._failed from error
            count = f"failure {self._num_failures} of checkpoint.max_failures={self._config.max_failures} in a row"
            self._log.note(f"{self._failed} Training goes on ({count}).")
        else:
            self._num_failures, self._failed = 0, None
            self._log.saved(saved.directory)
            if (remote := self._committer.remote) is not None:
                self._log.note(f"uploaded {remote.address(step)}")
            if saved.retention_error is not None:
                self._log.note(f"Step {step} is saved, but older ones could not be deleted. {saved.retention_error}")

    def _checked(self, step: int, result: Callable[[], SavedStep]) -> SavedStep:
        """The result of a save; an error of torch, for a rank that is lost or late, becomes a SaveError."""
        try:
            return result()
        except RuntimeError as error:
            raise SaveError(
                f"Step {step} could not be saved: not all ranks took part (checkpoint.timeout_seconds="
                f"{self._config.timeout_seconds:g}): {error}"
            ) from error

    def _settle(self) -> None:
        """Copy what the save in the background has not read yet, before the weights change."""
        if self._running is not None:
            self._running.copy.settle()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if self._running is None or isinstance(error, Interrupted) or not isinstance(error, Exception | None):
            return
        # An FsdpShardError is raised on all ranks, so all of them wait here; with any other, one may be lost.
        is_shared = error is None or isinstance(error, FsdpShardError)
        self._running.join(None if is_shared else _GRACE_SECONDS)
        if self._running.is_saved:
            self._log.saved(self._running.result().directory)


def open_saver(
    run_dir: str,
    config: CheckpointConfig,
    context: DistributedContext,
    loaded: LoadedModel,
    optimizer: Optimizer,
    model_files: Mapping[str, bytes],
    log: SaveLog,
) -> Saver:
    """Create the saver of a run, after deleting what an interrupted save left and uploading a step that was not.

    A collective.

    Args:
        run_dir: The run directory.
        config: The settings `checkpoint.*`.
        context: The ranks.
        loaded: The model.
        optimizer: Its optimizer.
        model_files: Config and tokenizer, by file name; needed on rank 0 only.
        log: What reports saves.

    Returns:
        The saver, to be used as a context manager.

    Raises:
        RemoteError: A step could not be uploaded.
    """
    store = Store(Path(run_dir) / CHECKPOINTS)
    run_on_main(context, store.clean_leftovers)
    committer = StepCommitter(context, store, config, is_adapter=loaded.adapter is not None)
    step = committer.upload_missing()
    if committer.remote is not None and step is not None:
        log.note(f"uploaded {committer.remote.address(step)}, which was in the run directory only")
    return Saver(context, config, RunObjects(loaded, optimizer, model_files), committer, log)
