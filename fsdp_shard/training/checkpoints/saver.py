"""Saves steps of a run of `finetune`: when a step is due, and which parts of the run it stores."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.distributed import DistributedContext, LocalShard, run_on_all, run_on_main
from fsdp_shard.errors import SaveError
from fsdp_shard.training.checkpoints.background_saver import BackgroundSaver, SaveLog
from fsdp_shard.training.checkpoints.checkpointer_document import first_difference
from fsdp_shard.training.checkpoints.optimizer_groups import state_digests, why_not_savable
from fsdp_shard.training.checkpoints.resume import read_trainer
from fsdp_shard.training.checkpoints.run_lock import RunLock
from fsdp_shard.training.checkpoints.step_publisher import StepPublisher
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.training.optim.ema import WeightAverage
from fsdp_shard.training.optim.group_watch import GroupWatch
from fsdp_shard.training.optim.whole_param_optimizer import FullParamOptimizer
from fsdp_shard.training.trainer_state import TrainerState, is_due


class RunContent(NamedTuple):
    """What a run saves in each of its steps, except its progress.

    Attributes:
        loaded: The model.
        optimizer: Its optimizer.
        average: The average of the weights, if the run has one.
        model_files: Config, tokenizer and settings of the run, by file name; needed on rank 0 only.
    """

    loaded: LoadedModel
    optimizer: Optimizer
    average: WeightAverage | None
    model_files: Mapping[str, bytes]


class FinetuneSaver(BackgroundSaver):
    """Saves steps of a run of `finetune`; a context manager. Methods but `is_due` are collectives.

    It begins by deleting what an interrupted save left and uploading the newest step if the remote lacks it. If there
    is no step yet, config.yaml of the run directory receives the settings of this run.

    Args:
        run_dir: The run directory.
        config: The settings `checkpoint.*`.
        context: The ranks.
        content: What each step contains, except the progress of the run.
        log: Reports saves.
        lock: The lock of the run, which a save that goes on keeps.

    Raises:
        RemoteError: A step could not be uploaded.
    """

    def __init__(
        self,
        run_dir: str,
        config: checkpoint.CheckpointConfig,
        context: DistributedContext,
        content: RunContent,
        log: SaveLog,
        lock: RunLock,
    ) -> None:
        store = checkpoint.StepStore(Path(run_dir) / checkpoint.CHECKPOINTS)
        run_on_main(context, lambda: _begin(store, content.model_files))
        publisher = StepPublisher(context, store, config, is_adapter=content.loaded.adapter is not None)
        if (error := publisher.apply_retention()) is not None:
            log.warn(f"Older steps could not be deleted. {error}")
        step = publisher.upload_missing()
        if publisher.remote is not None and step is not None:
            log.note(f"uploaded {publisher.remote.address(step)}, which was in the run directory only")
        super().__init__(context, config, publisher, log, lock)
        self._run_content = content
        self.copy_before_steps_of([content.optimizer])
        self._watch = GroupWatch(content.optimizer) if config.optimizer else None
        self._optimizer_is_checked = self._states_were_compared = False
        self._belated: tuple[int, float | None] = 0, None  # a step that was saved before its evaluation, and its loss

    def is_due(self, state: TrainerState, num_steps: int) -> bool:
        """Return whether the settings require a save after the step of `state`, in a run of `num_steps` steps."""
        return is_due(state.step, self._config.every, num_steps) or (self._config.save_best and state.is_best)

    def save(self, state: TrainerState) -> None:
        """Save the current state, after waiting for the previous save.

        Raises:
            SaveError: This save or the previous one failed, and the run has to stop for it.
        """
        self.wait()  # the previous save may mark its step as the best
        is_best = run_on_main(self._ranks, lambda: self._is_best(state))
        content, in_background = self._step_content(state), self._config.asynchronous
        self.save_content(state.step, content, is_best=is_best, in_background=in_background)

    def _step_content(self, state: TrainerState) -> checkpoint.StepContent:
        """Return this rank's part of a step directory."""
        run, shards = self._run_content, self._run_content.loaded.model.local_shards()
        content = checkpoint.StepContent(
            weights=shards,
            aliases=run.loaded.aliases,
            optimizer=self._optimizer_states(shards) if self._config.optimizer else {},
            model_files={**run.model_files, checkpoint.TRAINER: state.to_json().encode()},
            average={} if run.average is None else run.average.weights(),
        )
        if (adapter := run.loaded.adapter) is None:
            return content
        return replace(
            content,
            weights=adapter.to_save(shards, self._ranks),
            aliases={},
            single_file=adapter.FILE,
            average=adapter.stored(content.average) if content.average else {},
        )

    def _optimizer_states(self, shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
        """This rank's optimizer state; a collective."""

        def states() -> dict[str, LocalShard]:
            self._check_optimizer(shards)
            return checkpoint.optimizer_shards(self._run_content.optimizer, shards)

        found = run_on_all(self._ranks, states)
        if self._ranks.world_size > 1:
            self._check_same_states(shards)
        return found

    def _check_same_states(self, shards: Mapping[str, LocalShard]) -> None:
        """Raise SaveError if the ranks hold other values of a state that only one of them saves; a collective."""
        optimizer = self._run_content.optimizer
        digests = state_digests({"": optimizer}, shards, of_any_size=not self._states_were_compared)
        self._states_were_compared = True
        if (name := first_difference(self._ranks, digests)) is not None:
            raise SaveError(
                f"{type(optimizer).__name__} cannot be saved: the ranks differ in {name}, and only the values of "
                f"one rank could be restored. Make them equal, or DTensors, or set checkpoint.optimizer=false."
            )

    def _check_optimizer(self, shards: Mapping[str, LocalShard]) -> None:
        """Raise SaveError if the optimizer has a state that would be lost in a resume."""
        optimizer = self._run_content.optimizer
        inner = optimizer.inner if isinstance(optimizer, FullParamOptimizer) else optimizer
        why = why_not_savable(inner)
        if values := checkpoint.optimizer_values(optimizer, shards):
            name, value = min(values.items())
            why = why or f"it keeps {name}={value!r} in its state, which is not a tensor and would be lost in a resume"
        if (changed := self._watch and self._watch.changed) is not None:
            why = why or f"its steps change {changed} in a parameter group, which would be lost in a resume"
        if why is not None:
            raise SaveError(
                f"{type(inner).__name__} cannot be saved: {why}. Keep all that changes in tensors of "
                f"optimizer.state[param], or set checkpoint.optimizer=false, which allows no resume."
            )

    def poll(self) -> None:
        """Conclude the background save if it has ended on all ranks; call this after each step.

        Raises:
            SaveError: The save failed, and the run must stop; or the first step shows that the optimizer cannot be
                saved.
        """
        if not self._optimizer_is_checked and self._config.optimizer:
            self._optimizer_is_checked = True
            run_on_all(self._ranks, lambda: self._check_optimizer(self._run_content.loaded.model.local_shards()))
        super().poll()

    def note_best(self, state: TrainerState) -> None:
        """Mark the step that the run resumed from as the best, if its belated evaluation shows that."""
        run_on_main(self._ranks, lambda: self._mark_if_best(state))

    def _mark_if_best(self, state: TrainerState) -> None:
        if self._is_best(state):
            self._publisher.mark_best(state.step)
            self._belated = state.step, state.held_out_loss

    def _is_best(self, state: TrainerState) -> bool:
        """Return whether a step has a lower held-out loss than the saved step marked as the best; on rank 0.

        The marked step is the best of all steps only if `checkpoint.save_best` saves every new best one.
        """
        if (loss := state.held_out_loss) is None:
            return False
        if (marked := self._publisher.store.best()) is None:
            return True
        if marked == state.best_step:
            return state.best_loss is None or loss < state.best_loss
        before = read_trainer(self._publisher.store.path(marked))
        if before.held_out != state.held_out:  # another loss
            return True
        before_loss = self._belated[1] if marked == self._belated[0] else before.held_out_loss
        if before_loss is None:  # saved by an older version, or before it was evaluated
            return state.is_best
        return loss < before_loss


def _begin(store: checkpoint.StepStore, model_files: Mapping[str, bytes]) -> None:
    """Delete what an interrupted save left, and write the newest step's settings, or this run's, to config.yaml."""
    if store.recover() is None and (settings := model_files.get(checkpoint.RUN_CONFIG)) is not None:
        store.set_config(settings)
