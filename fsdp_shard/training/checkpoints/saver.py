"""Saving steps of a run, behind the training or not: what is saved, one save at a time, and what a failure means.

Whether and when to save is the recipe's; how bytes lie on the disk is `checkpoint`'s. A save in the background goes on
in a thread of its own (hashing and writing let go of the interpreter), is settled before the optimizer changes what it
has still to read, and meets the other ranks' in a process group of its own. What it came to is agreed on by all ranks,
in the main thread, before any acts on it: `poll` after a step, `finish` before the run ends.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fsdp_shard.checkpoint import (
    CHECKPOINTS,
    CheckpointConfig,
    Copy,
    RemoteStore,
    RunState,
    Staging,
    Store,
    catch_up,
    check_content,
    check_files,
    drop_cache,
    fault_point,
    optimizer_shards,
    prune_remote,
    save_step,
    upload_step,
)
from fsdp_shard.errors import CheckpointError, FsdpShardError, Interrupted, RemoteError, SaveError, StorageError
from fsdp_shard.training.model_setup import LoadedModel
from fsdp_shard.training.optim.lr_schedule import is_due
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import parse_size

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fsdp_shard.distributed import DistributedContext


_GRACE_SECONDS = 10.0  # for a save to end when another rank may be lost


class SaveLog(Protocol):
    """Who is told of saves; on all ranks alike."""

    def note(self, lines: str) -> None: ...

    def saved(self, checkpoint: Path) -> None: ...


class Saved(NamedTuple):
    """A committed step, and what kept older ones from being deleted, or the best one from being marked."""

    directory: Path
    undeleted: StorageError | None


class Flight:
    """A save in the background: `work`, which reads the state through `copy`, in a thread."""

    def __init__(self, step: int, copy: Copy, work: Callable[[], Saved]) -> None:
        self.step, self.copy, self._work = step, copy, work
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save-step-{step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def join(self, timeout_seconds: float | None = None) -> None:
        self._thread.join(timeout_seconds)

    def result(self) -> Saved:
        """What was saved, or the error that the save ended with; waits for it."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def _run(self) -> None:
        try:
            self.copy.wait()
            fault_point("staged")
            self._saved = self._work()
        except BaseException as error:  # told to the main thread, whatever it is
            self._error = error
        finally:
            self.copy.end()


class Saver:
    """Saves steps of one run; every method is a collective. `side_files` are needed on rank 0 only.

    A context: leaving it by an error waits for a save in flight, unless a second signal asks to end at once.
    """

    def __init__(
        self,
        context: DistributedContext,
        store: Store,
        config: CheckpointConfig,
        loaded: LoadedModel,
        optimizer: Optimizer,
        side_files: Mapping[str, bytes],
        log: SaveLog,
    ) -> None:
        self._context, self._store, self._config = context, store, config
        self._loaded, self._optimizer, self._side_files, self._log = loaded, optimizer, side_files, log
        self._saving = context.beside(config.timeout_seconds)
        self._remote = None if config.remote is None else RemoteStore(config.remote)
        self._staging = Staging()
        self._flight: Flight | None = None
        self._failed: StorageError | None = None
        self._num_failures = 0
        self._best: int | None = None  # of the steps saved here
        self._remote_best: int | None = None  # of those, what was uploaded
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._settle())

    def is_due(self, state: TrainerState, num_steps: int) -> bool:
        """Whether the settings ask for a save where the run stands."""
        every_nth = is_due(state.step, self._config.every, num_steps)
        return every_nth or (self._config.save_best and state.is_best)

    def catch_up(self) -> None:
        """Upload the latest step where an earlier part of the run could not."""
        if self._remote is not None and (step := catch_up(self._saving, self._remote, self._store)) is not None:
            self._log.note(f"uploaded {self._remote.address(step)}, which was in the run directory only")

    def save(self, state: TrainerState) -> None:
        """Save the state as it is now, once the save in flight has ended."""
        self.wait()
        step, is_best, whole = state.step, state.is_best, self._whole(state)
        if not self._config.asynchronous:
            self._conclude(step, lambda: self._write(step, whole, is_best))
            return
        staged, copy = self._staging.stage(whole)
        self._log.note(f"saving step {step} in the background")
        self._flight = Flight(step, copy, lambda: self._write(step, staged, is_best))

    def note_best(self, state: TrainerState) -> None:
        """Point to the step that the run goes on from, if an evaluation that it still owed finds it the best."""
        if state.is_best:
            self._context.together(lambda: self._point_best(state.step))

    def _point_best(self, step: int) -> None:
        for store in (self._store, self._remote) if self._context.is_main else ():
            if store is not None and step in store.steps():  # it may be another run's
                store.set_best(step)

    def poll(self) -> None:
        """Learn what the save in flight has come to, if it has ended on all ranks; to be called after each step."""
        if self._flight is not None and self._context.all_reduce([float(self._flight.is_done)], "min")[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight; what it came to is logged, or raised if the run has to stop for it."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._conclude(flight.step, flight.result)

    def finish(self) -> None:
        """Wait for the save in flight; whatever kept the last one of the run from succeeding is raised."""
        self.wait()
        if self._failed is not None:
            raise self._failed

    def _conclude(self, step: int, result: Callable[[], Saved]) -> None:
        """Act on what a save came to, as all ranks agree that it did."""
        try:
            saved = self._context.together(lambda: self._in_our_words(step, result))
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
            if self._remote is not None:
                self._log.note(f"uploaded {self._remote.address(step)}")
            if saved.undeleted is not None:
                self._log.note(f"Step {step} is saved, but older ones could not be tidied up. {saved.undeleted}")

    def _in_our_words(self, step: int, result: Callable[[], Saved]) -> Saved:
        try:
            return result()
        except RuntimeError as error:  # torch's, for a rank that is lost or late
            if isinstance(error, FsdpShardError):
                raise
            raise SaveError(
                f"Step {step} could not be saved: the ranks did not meet (checkpoint.timeout_seconds="
                f"{self._config.timeout_seconds:g}): {error}"
            ) from error

    def _whole(self, state: TrainerState) -> RunState:
        shards = self._loaded.model.local_shards()
        optimizer = optimizer_shards(self._optimizer, shards) if self._config.optimizer else {}
        trainer = json.loads(state.to_json())
        if (adapter := self._loaded.adapter) is not None:
            return RunState(adapter.stored(shards), {}, optimizer, trainer, self._side_files, adapter.FILE)
        return RunState(shards, self._loaded.aliases, optimizer, trainer, self._side_files)

    def _write(self, step: int, state: RunState, is_best: bool) -> Saved:
        """Commit the step, delete what `checkpoint.keep_*` no longer keep, then do both on the remote store.

        In this order, as what a store elsewhere refuses is none of this machine's business. No logging, as this may be
        a thread.
        """
        layout = self._config.layout if self._loaded.adapter is None else "gathered"  # peft knows one file only
        limits = layout == "gathered" and self._loaded.adapter is None
        size = parse_size(self._config.max_shard_size, "checkpoint.max_shard_size") if limits else None
        directory = save_step(self._saving, self._store, step, state, layout=layout, max_shard_bytes=size)
        if self._config.verify:
            self._read_back(step, directory)
        undeleted = self._try_together(lambda: self._tidy(step, is_best))
        if self._remote is not None:
            upload_step(self._saving, self._remote, step, directory)
            undeleted = self._try_together(lambda: self._tidy_remote(step, is_best)) or undeleted
        return Saved(directory, undeleted)

    def _try_together(self, work: Callable[[], None]) -> StorageError | None:
        """What kept any rank from doing something that no checkpoint hangs on."""
        try:
            self._saving.together(work)
        except StorageError as error:
            return error
        return None

    def _read_back(self, step: int, directory: Path) -> None:
        """Have all ranks together compare what is on the disk with the manifest."""
        context = self._saving
        try:
            context.together(lambda: drop_cache(directory, check_files(directory)))
            context.together(lambda: check_content(directory, context.rank, context.world_size))
        except CheckpointError as error:
            raise SaveError(f"Step {step} was saved, but does not read back as it was written. {error}") from error
        fault_point("verified")

    def _tidy(self, step: int, is_best: bool) -> None:
        if not self._saving.is_main:
            return
        if is_best:
            self._best = self._replace_best(self._store, self._best, step)
        if self._config.keep_last is not None:
            self._store.prune(self._config.keep_last, self._config.keep_every)
        if self._config.keep_optimizer_last is not None:
            self._store.drop_optimizer(self._config.keep_optimizer_last)

    def _tidy_remote(self, step: int, is_best: bool) -> None:
        if self._remote is None or not self._saving.is_main:
            return
        if is_best:
            self._remote_best = self._replace_best(self._remote, self._remote_best, step)
        prune_remote(self._remote, step, self._config.keep_last, self._config.keep_every)

    def _replace_best(self, store: Store | RemoteStore, before: int | None, step: int) -> int:
        """Point to a better step, and let the one before go if it was saved for being the best only.

        What an earlier part of the run has left is not touched: it may be the step that it ended with.
        """
        kept = [every for every in (self._config.every, self._config.keep_every) if every]
        store.set_best(step)
        if before is not None and all(before % every for every in kept) and before in store.steps():
            store.delete(before)
        return step

    def _settle(self) -> None:
        """What the weights' next change has to wait for."""
        if self._flight is not None:
            self._flight.copy.settle()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if self._flight is None or isinstance(error, Interrupted) or not isinstance(error, Exception | None):
            return
        # An error of ours is one that all ranks have, so all of them are here; with any other, one may be lost.
        is_shared = error is None or isinstance(error, FsdpShardError)
        self._flight.join(None if is_shared else _GRACE_SECONDS)
        if self._flight.is_done and not self._flight.failed:
            self._log.saved(self._flight.result().directory)


def open_saver(
    run_dir: str,
    config: CheckpointConfig,
    context: DistributedContext,
    loaded: LoadedModel,
    optimizer: Optimizer,
    side_files: Mapping[str, bytes],
    log: SaveLog,
) -> Saver:
    """The saver of the run in `run_dir`, after removing what an interrupted save may have left there, and uploading the
    latest step where that was interrupted; a collective.
    """
    store = Store(Path(run_dir) / CHECKPOINTS)
    context.decide(store.clean_leftovers)
    saver = Saver(context, store, config, loaded, optimizer, side_files, log)
    saver.catch_up()
    return saver
