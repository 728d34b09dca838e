"""Puts the steps of a run where they are kept, the run directory and a remote store, and applies retention in both."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import CheckpointConfig, RemoteStore, StepContent, StepStore
from fsdp_shard.distributed import Communicator, run_on_all, run_on_main
from fsdp_shard.errors import CheckpointError, SaveError, StorageError


class SavedStep(NamedTuple):
    """A committed step, and the error that prevented deleting older steps or marking the best one, if any."""

    directory: Path
    followup_error: StorageError | None


class StepPublisher:
    """Publishes steps to `store` and to `checkpoint.remote`, where retention then deletes older ones.

    `publish`, `upload_missing` and `apply_retention` are collectives; `mark_best` is for rank 0. A separate
    process group lets a thread call them during training. Nothing here logs.

    Args:
        ranks: The ranks.
        store: The checkpoints of the run.
        config: The settings `checkpoint.*`.
        is_adapter: The weights are an adapter, which peft reads from one file only.

    Attributes:
        store: The checkpoints of the run.
        remote: Those at `checkpoint.remote`, if any.
        not_fetched: The latest step there, if there was none in the run directory when `upload_missing` was called.
    """

    def __init__(self, ranks: Communicator, store: StepStore, config: CheckpointConfig, *, is_adapter: bool) -> None:
        self._ranks = ranks.with_new_group(config.timeout_seconds)
        self.store, self._config = store, config
        self.remote = None if config.remote is None else RemoteStore(config.remote)
        self._layout = "gathered" if is_adapter else config.layout
        self._max_shard_bytes = None if is_adapter else config.max_shard_bytes
        self._best: dict[StepStore | RemoteStore, int] = {}  # of the steps that this process has committed
        self.not_fetched: int | None = None
        self._run_id: bytes | None = None

    def close(self) -> None:
        """Destroy the group of the saves, after the last one."""
        self._ranks.destroy_group()

    def publish(self, step: int, content: StepContent, *, is_best: bool) -> SavedStep:
        """Write and commit a step, apply retention (`checkpoint.keep_*`), then upload the step and do the same there.

        Args:
            step: The step.
            content: This rank's part of it.
            is_best: Make `best` point to the step.

        Raises:
            RemoteError: The step is committed in the run directory but could not be uploaded.
            StorageError: A disk is full or fails; nothing was committed.
            SaveError: The step could not be committed for another reason, or does not read back as it was written.
        """
        self._run_id = run_on_main(self._ranks, self._current_run_id)
        content = replace(content, model_files={**content.model_files, checkpoint.RUN_ID: self._run_id})
        directory = checkpoint.save_step(
            self._ranks, self.store, step, content, layout=self._layout, max_shard_bytes=self._max_shard_bytes
        )
        if self._config.verify:
            self._read_back(step, directory)
        error = self._try_on_main(lambda: self._mark_and_prune(step, is_best=is_best))
        if (remote := self.remote) is not None:
            checkpoint.upload_step(self._ranks, remote, step, directory)
            error = self._try_on_main(lambda: self._mark_and_prune_remote(remote, step, is_best=is_best)) or error
        return SavedStep(directory, error)

    def upload_missing(self) -> int | None:
        """Upload the latest step if an earlier part of the run could not; returns it."""
        if (remote := self.remote) is None:
            return None

        def not_fetched() -> tuple[int | None, bytes | None]:
            latest = remote.latest() if self.store.latest() is None else None
            return latest, None if latest is None else checkpoint.remote_run_id(remote, latest)

        self.not_fetched, self._run_id = run_on_main(self._ranks, not_fetched)
        return checkpoint.catch_up(self._ranks, remote, self.store)

    def apply_retention(self) -> StorageError | None:
        """Delete the steps that `checkpoint.keep_*` do not keep, after a run was stopped, perhaps by a full disk.

        Returns:
            The error that prevented the deletion, if any.
        """
        return self._try_on_main(self._apply_retention)

    def mark_best(self, step: int) -> None:
        """Make `best` point to a step, on each store that has it."""
        for store in (self.store, self.remote):
            if store is not None and step in store.steps():  # it may belong to another run
                store.set_best(step)

    def _current_run_id(self) -> bytes:
        """The run id of the saved steps, or that of the remote store if the run resumes from there, or a new one."""
        return checkpoint.run_id_of(self.store) or self._run_id or checkpoint.new_run_id()

    def _try_on_main(self, work: Callable[[], None]) -> StorageError | None:
        """Run work that the checkpoint does not depend on, and return the error if it fails."""
        try:
            run_on_main(self._ranks, work)
        except StorageError as error:
            return error
        return None

    def _read_back(self, step: int, directory: Path) -> None:
        """Compare the files on disk with the manifest; each rank reads a part."""
        ranks = self._ranks
        try:
            run_on_all(ranks, lambda: checkpoint.drop_cache(directory, ranks.rank))
            run_on_all(ranks, lambda: checkpoint.check_content(directory, ranks.rank, ranks.world_size))
        except CheckpointError as error:
            raise SaveError(f"Step {step} was saved, but does not read back as it was written. {error}") from error
        checkpoint.fault_point("verified")

    def _mark_and_prune(self, step: int, *, is_best: bool) -> None:
        if is_best:
            self._replace_best(self.store, step)
        self._apply_retention()

    def _apply_retention(self) -> None:
        config = self._config
        if config.keep_last is not None:
            self.store.prune(config.keep_last, config.keep_every)
        if config.keep_optimizer_last is not None:
            self.store.drop_optimizer(config.keep_optimizer_last)

    def _mark_and_prune_remote(self, remote: RemoteStore, step: int, *, is_best: bool) -> None:
        if is_best:
            self._replace_best(remote, step)
        checkpoint.prune_remote(remote, step, self._config.keep_last, self._config.keep_every)

    def _replace_best(self, store: StepStore | RemoteStore, step: int) -> None:
        """Make `best` point to a better step, and delete the previous one if it was saved only for being the best.

        Steps of an earlier part of the run are kept: one of them may be the step that it ended with.
        """
        intervals = [interval for interval in (self._config.every, self._config.keep_every) if interval]
        store.set_best(step)
        before = self._best.get(store)
        if before is not None and all(before % interval for interval in intervals) and before in store.steps():
            store.delete(before)
        self._best[store] = step
