"""Saving steps of a run, in the background or not: when, one at a time, and what happens when a save fails.

A save in the background is settled before the optimizer changes what it has still to read. All ranks agree on its
outcome, in the main thread, before any acts on it: `poll` after a step, `finish` before the run ends.
"""

import concurrent.futures
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.distributed import DistributedContext, run_on_all, run_on_main
from fsdp_shard.errors import FsdpShardError, Interrupted, RemoteError, SaveError, StorageError
from fsdp_shard.training.checkpoints.step_committer import SavedStep, StepCommitter
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.training.optim.lr_schedule import is_due
from fsdp_shard.training.trainer_state import TrainerState

_GRACE_SECONDS = 10.0  # for a save to end when another rank may be lost
T = TypeVar("T")


class SaveLog(Protocol):
    """What reports saves; called on all ranks alike."""

    def note(self, lines: str) -> None:
        """Report something in words."""

    def saved(self, checkpoint: Path) -> None:
        """Report a committed step."""


class BackgroundSave(Generic[T]):
    """Calls `work`, which reads the state of step `step` through `copy`, in a daemon thread: its hashing and writing
    release the interpreter.
    """

    def __init__(self, step: int, copy: checkpoint.StagedCopy, work: Callable[[], T]) -> None:
        self.step, self.copy = step, copy
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=self._run, args=(work,), name=f"save-step-{step}", daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            try:
                self.copy.wait()
                checkpoint.fault_point("staged")
                saved = work()
            finally:
                self.copy.end()
        except BaseException as error:  # raised in the main thread by `outcome.result`, whatever it is
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(saved)


class Saver:
    """Saves steps of one run; every method is a collective.

    A context manager: leaving it by an error waits for a save in the background, unless a second signal asks to end at
    once.
    """

    def __init__(
        self,
        context: DistributedContext,
        config: checkpoint.CheckpointConfig,
        loaded: LoadedModel,
        optimizer: Optimizer,
        model_files: Mapping[str, bytes],
        committer: StepCommitter,
        log: SaveLog,
    ) -> None:
        self._context, self._config, self._log = context, config, log
        self._loaded, self._optimizer, self._model_files = loaded, optimizer, model_files
        self._committer = committer
        self._staging = checkpoint.Staging()
        self._running: BackgroundSave[SavedStep] | None = None
        self._failed: StorageError | None = None
        self._num_failures = 0
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._settle())

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
        run_state = self._run_state(state)
        if not self._config.asynchronous:
            self._conclude(step, lambda: self._committer.commit(step, run_state, is_best=is_best))
            return
        staged, copy = self._staging.stage(run_state)
        self._log.note(f"saving step {step} in the background")
        self._running = BackgroundSave(step, copy, lambda: self._committer.commit(step, staged, is_best=is_best))

    def _run_state(self, trainer: TrainerState) -> checkpoint.RunState:
        """This rank's part of what a step directory holds."""
        shards, document = self._loaded.model.local_shards(), json.loads(trainer.to_json())
        states = checkpoint.optimizer_shards(self._optimizer, shards) if self._config.optimizer else {}
        if (adapter := self._loaded.adapter) is not None:
            return checkpoint.RunState(adapter.stored(shards), {}, states, document, self._model_files, adapter.FILE)
        return checkpoint.RunState(shards, self._loaded.aliases, states, document, self._model_files)

    def note_best(self, state: TrainerState) -> None:
        """Mark the step that the run resumed from as the best, if the evaluation that it still owed says so."""
        if state.is_best:
            run_on_main(self._context, lambda: self._committer.mark_best(state.step))

    def poll(self) -> None:
        """Conclude the save in the background, if it has ended on all ranks; to be called after each step.

        Raises:
            SaveError: The save failed, and the run has to stop for it.
        """
        if self._running is not None and self._context.all_reduce([float(self._running.outcome.done())], "min")[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, and log its outcome or raise its error if the run has to stop for it."""
        if self._running is not None:
            running, self._running = self._running, None
            self._conclude(running.step, running.outcome.result)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if self._running is None or isinstance(error, Interrupted) or not isinstance(error, Exception | None):
            return
        # An FsdpShardError is raised on all ranks, so all of them wait here; with any other, one may be lost.
        is_shared = error is None or isinstance(error, FsdpShardError)
        outcome = self._running.outcome
        concurrent.futures.wait([outcome], None if is_shared else _GRACE_SECONDS)
        if outcome.done() and outcome.exception() is None:
            self._log.saved(outcome.result().directory)


def open_saver(
    run_dir: str,
    config: checkpoint.CheckpointConfig,
    context: DistributedContext,
    loaded: LoadedModel,
    optimizer: Optimizer,
    model_files: Mapping[str, bytes],
    log: SaveLog,
) -> Saver:
    """Create the saver of a run, after deleting what an interrupted save left and uploading a step that was not.

    A collective. If there is no step yet, config.yaml of the run directory gets the settings of this run.

    Args:
        run_dir: The run directory.
        config: The settings `checkpoint.*`.
        context: The ranks.
        loaded: The model.
        optimizer: Its optimizer.
        model_files: Config, tokenizer and settings of the run, by file name; needed on rank 0 only.
        log: What reports saves.

    Returns:
        The saver, to be used as a context manager.

    Raises:
        RemoteError: A step could not be uploaded.
    """
    store = checkpoint.Store(Path(run_dir) / checkpoint.CHECKPOINTS)
    run_on_main(context, lambda: _begin(store, model_files))
    committer = StepCommitter(context, store, config, is_adapter=loaded.adapter is not None)
    step = committer.upload_missing()
    if committer.remote is not None and step is not None:
        log.note(f"uploaded {committer.remote.address(step)}, which was in the run directory only")
    return Saver(context, config, loaded, optimizer, model_files, committer, log)


def _begin(store: checkpoint.Store, model_files: Mapping[str, bytes]) -> None:
    """Delete what an interrupted save left. config.yaml gets the settings of the newest step, or of this run."""
    store.clean_leftovers()
    if (latest := store.latest()) is not None:
        store.set_latest(latest)
    elif (settings := model_files.get(checkpoint.RUN_CONFIG)) is not None:
        store.set_config(settings)
