"""Saves one step at a time, optionally in the background, and handles failed saves.

Before the optimizer changes tensors that a background save has yet to read, they are copied. All ranks agree on the
outcome of a save, in the main thread, before any rank acts on it: `poll` after a step, `finish` before the run ends.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import CheckpointConfig, StepContent
from fsdp_shard.distributed import Communicator, run_on_all
from fsdp_shard.errors import FsdpShardError, Interrupted, RemoteError, SaveError, StorageError
from fsdp_shard.training.checkpoints.run_lock import RunLock
from fsdp_shard.training.checkpoints.step_publisher import SavedStep, StepPublisher

_GRACE_SECONDS = 10.0  # for a save to end when another rank may be lost
T = TypeVar("T")


class SaveLog(Protocol):
    """Reports saves; every rank makes the same calls."""

    def note(self, lines: str) -> None:
        """Report a message."""

    def warn(self, lines: str) -> None:
        """Report a failure that does not end the run."""

    def saved(self, directory: Path) -> None:
        """Report a committed step."""


class BackgroundSave(Generic[T]):
    """Runs `work`, which reads the content of step `step` through `copy`, in a daemon thread.

    Hashing and writing release the GIL.
    """

    def __init__(self, step: int, copy: checkpoint.StagedCopy, work: Callable[[], T]) -> None:
        self.step, self.copy = step, copy
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.thread = threading.Thread(target=self._run, args=(work,), name=f"save-step-{step}", daemon=True)
        self.thread.start()

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


class BackgroundSaver:
    """Saves steps of one run, one at a time; a context manager.

    `save_content`, `poll`, `wait`, `finish` and leaving the block are collectives. If the block raises, it waits for
    the background save, unless a second signal asks to end at once.

    Args:
        ranks: The ranks.
        config: The settings `checkpoint.*`.
        publisher: Writes a step where the run keeps its steps.
        log: Reports saves.
        lock: The lock of the run, which a save that goes on keeps.
        prefix: Prefix of the settings in messages.
    """

    def __init__(
        self,
        ranks: Communicator,
        config: CheckpointConfig,
        publisher: StepPublisher,
        log: SaveLog,
        lock: RunLock,
        prefix: str = "checkpoint.",
    ) -> None:
        self._ranks, self._config, self._publisher, self._log = ranks, config, publisher, log
        self._lock, self._prefix = lock, prefix
        self._staging = checkpoint.Staging()
        self._running: BackgroundSave[SavedStep] | None = None
        self._failed: StorageError | None = None
        self._num_failures = 0
        self._hooked: dict[Optimizer, Callable[[], None]] = {}

    def copy_before_steps_of(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what the background save has not read yet before a step of one of `optimizers` changes it."""
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooked[optimizer] = optimizer.register_step_pre_hook(lambda *_: self._copy_remaining()).remove

    def save_content(self, step: int, content: StepContent, *, is_best: bool, in_background: bool) -> None:
        """Save a step, after waiting for the previous save.

        Args:
            step: The step.
            content: This rank's part of it.
            is_best: Make `best` point to the step.
            in_background: Return before the step is written; `copy_before_steps_of` was called for the optimizers that
                change the content.

        Raises:
            SaveError: This save or the previous one failed, and the run must stop.
        """
        self.wait()
        if not in_background:
            self._conclude(step, lambda: self._publisher.publish(step, content, is_best=is_best))
            return
        staged, copy = self._staging.stage(content)
        self._log.note(f"saving step {step} in the background")
        self._running = BackgroundSave(step, copy, lambda: self._publisher.publish(step, staged, is_best=is_best))

    def poll(self) -> None:
        """Conclude the background save if it has ended on all ranks; call this after each step.

        Raises:
            SaveError: The save failed, and the run must stop.
        """
        if self._running is not None and self._ranks.all_reduce([float(self._running.outcome.done())], "min")[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the background save, and log its outcome, or raise its error if the run must stop."""
        if (running := self._running) is not None:
            try:
                self._conclude(running.step, running.outcome.result)
            finally:
                self._forget(running)

    def finish(self) -> None:
        """Wait for the background save, and raise the error of the run's last save if it failed."""
        self.wait()
        if self._failed is not None:
            raise self._failed

    def abandon(self, *, is_failing: bool) -> None:
        """Wait for the save in the background where the ranks no longer agree on anything, and report how it ended.

        Meanwhile, an optimizer may still step in another thread, which copies what the save has not read yet.

        Args:
            is_failing: Wait for a short time only: another rank may be lost.
        """
        if self._running is not None:
            self._end(self._running, _GRACE_SECONDS if is_failing else None)

    @property
    def is_saving(self) -> bool:
        """Whether a background save has not ended."""
        return self._running is not None and not self._running.outcome.done()

    @property
    def is_saving_here(self) -> bool:
        """Whether the background save runs in the current thread, which therefore cannot wait for it."""
        return self._running is not None and self._running.thread is threading.current_thread()

    def _forget(self, running: BackgroundSave[SavedStep]) -> None:
        """Forget a save, unless Ctrl-C or a limit of time has ended the wait for it."""
        if running.outcome.done():
            self._running = None

    def _conclude(self, step: int, result: Callable[[], SavedStep]) -> None:
        """Act on the outcome of a save on which all ranks agree."""
        try:
            saved = run_on_all(self._ranks, lambda: self._result_or_save_error(step, result))
        except StorageError as error:
            self._num_failures += 1
            self._failed = type(error)(
                f"Step {step} could not be {_missed(error)}. {error} Earlier checkpoints are kept."
            )
            if self._num_failures >= self._config.max_failures:
                raise self._failed from error
            limit = f"{self._prefix}max_failures={self._config.max_failures}"
            self._log.warn(f"{self._failed} Training continues (failure {self._num_failures} of {limit} in a row).")
        else:
            self._num_failures, self._failed = 0, None
            self._log.saved(saved.directory)
            if (remote := self._publisher.remote) is not None:
                self._log.note(f"uploaded {remote.address(step)}")
            if saved.followup_error is not None:
                self._log.warn(
                    f"Step {step} is saved, but the best step could not be marked, or older ones could not be deleted. "
                    f"{saved.followup_error}"
                )

    def _result_or_save_error(self, step: int, result: Callable[[], SavedStep]) -> SavedStep:
        """Return the result of a save; torch's error for a lost or late rank becomes a SaveError."""
        try:
            return result()
        except RuntimeError as error:
            raise SaveError(
                f"Step {step} could not be saved: not all ranks took part ({self._prefix}timeout_seconds="
                f"{self._config.timeout_seconds:g}): {error}"
            ) from error

    def _copy_remaining(self) -> None:
        """Copy the tensors that the background save has not read yet, before the weights change."""
        if self._running is not None:
            self._running.copy.copy_remaining()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for remove in self._hooked.values():
            remove()
        if (running := self._running) is None:
            return
        # An FsdpShardError is raised on all ranks, so all of them wait here, as they do after sys.exit(); with other
        # errors, a rank may be lost.
        is_shared = error is None or isinstance(error, FsdpShardError) or _is_success(error)
        self._end(running, 0 if isinstance(error, Interrupted) else None if is_shared else _GRACE_SECONDS)

    def _end(self, running: BackgroundSave[SavedStep], seconds: float | None) -> None:
        """Wait for a save, which keeps the lock of the run for as long as it goes on, and report how it ended."""
        self._lock.release_after(running.outcome)
        concurrent.futures.wait([running.outcome], seconds)
        if not running.outcome.done():
            self._log.warn(f"Step {running.step} was not on the disk yet when the process stopped waiting for it.")
        elif (failed := running.outcome.exception()) is not None:
            self._log.warn(f"Step {running.step} could not be {_missed(failed)}. {failed}")
        else:
            self._log.saved(running.outcome.result().directory)
        self._forget(running)


def _missed(error: BaseException) -> str:
    return "uploaded, and is in the run directory only" if isinstance(error, RemoteError) else "saved"


def _is_success(error: BaseException) -> bool:
    """Whether `error` ends the process with status 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
