"""fsdp-shard checkpoints in the Trainer of transformers and in TRL's trainers: a callback that replaces their saves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard, SeedableRandomSampler, get_sampler
from safetensors.torch import save_file
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.import_utils import is_peft_available

from fsdp_shard.checkpoint import CHECKPOINTS, CheckpointConfig, RemoteStore, StepStore, fetch_latest
from fsdp_shard.distributed import run_on_main, temporary_ranks
from fsdp_shard.errors import CheckpointError, ConfigError, FsdpShardError
from fsdp_shard.integrations.resumption import (
    check_every,
    data_of,
    digest_of_rows,
    has_length,
    report,
    report_no_best,
    require_same_data,
    stopped,
)
from fsdp_shard.integrations.trainer_settings import Groups, follow_arguments, settings_of
from fsdp_shard.training import Checkpointer, Restored, check_settings, random_state, restore_random_state
from fsdp_shard.utils import nearest, parse_json, read_bounded

# TrainingArguments that would save as well as the callback, be ignored, or lose the data position.
_REFUSED = {
    "save_strategy": ("no", "both would save; give `every` to CheckpointerCallback"),
    "save_total_limit": (None, "it is about the Trainer's own saves; give keep_last to CheckpointerCallback"),
    "save_only_model": (False, "it is about the Trainer's own saves"),
    "enable_jit_checkpoint": (False, "CheckpointerCallback saves when the run is asked to stop"),
    "load_best_model_at_end": (False, "it reads the Trainer's own saves; give `monitor` and load PATH@best"),
    "ignore_data_skip": (False, "a resumed run would see other batches"),
    "auto_find_batch_size": (False, "a resumed run may see other batches"),
}

_FACTORS = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
_NOTHING = "none.safetensors"


class CheckpointerCallback(TrainerCallback):
    """Saves the steps of `Trainer.train` with a `Checkpointer`, and resumes from the last one.

    The same call starts and resumes a run: `train(resume_from_checkpoint=callback.resume_from(trainer))`. The callback
    saves at regular intervals and at the last step. When asked to stop (SIGTERM, SIGINT, SIGUSR1 or SIGHUP), it saves
    once more and ends `train` with `Interrupted`. It works with models on one device, under DDP, under FSDP, and those
    that transformers shards itself (`DistributedConfig`).

    Args:
        path: The run directory.
        every: Save after this many more optimizer steps; None uses the Trainer's `save_steps`.
        monitor: The evaluation metric that determines the best step, such as `eval_loss`.
        mode: `min` or `max`: whether the lowest or highest value is best.
        settings: `Checkpointer` settings, such as `keep_last=3`.

    Example:
        >>> from fsdp_shard.integrations import CheckpointerCallback
        >>> callback = CheckpointerCallback("runs/mine", every=100, keep_last=3)
        >>> arguments = TrainingArguments(save_strategy="no")  # doctest: +SKIP
        >>> trainer = Trainer(model, arguments, callbacks=[callback], train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=callback.resume_from(trainer))  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        monitor: str | None = None,
        mode: str = "min",
        **settings: Any,
    ) -> None:
        check_every(every)
        if "processor" in settings:
            raise ConfigError(
                "processor is not a setting of CheckpointerCallback: it saves the Trainer's processing_class."
            )
        check_settings(settings, mode, kind="CheckpointerCallback", other_names=("every", "monitor", "mode"))
        self._path, self._settings = Path(path).expanduser().absolute(), {"mode": mode, **settings}
        self._every, self._monitor = every, monitor
        self._trainer: Trainer | None = None
        self._checkpointer: Checkpointer | None = None
        self._prepared: TemporaryDirectory[str] | None = None
        self._step: int | None = None  # found by `resume_from`
        self._position: int | None = None  # passed to the Trainer
        self._saved = 0  # the last saved step
        self._epoch = 0  # of the next batch
        self._epoch_random: Any = None  # at the start of that epoch
        self._step_random: Any = None  # for the first step of a resumed run
        self._initial_groups: Groups | None = None  # the optimizer settings before the run's first step
        self._rows: str | None = None  # digest of the training data

    def resume_from(self, trainer: Trainer) -> str | None:
        """Return the `resume_from_checkpoint` for `trainer.train`: a directory that leads to the last step, or None.

        This small directory, one per rank, contains the position for the Trainer but no weights. Weights and all other
        state are restored when `train` begins, once the model is wrapped. All ranks call this method.

        Args:
            trainer: The Trainer with this callback.

        Raises:
            ConfigError: The Trainer also saves by itself, or another run uses the directory.
        """
        self._check(trainer.args)
        if self not in trainer.callback_handler.callbacks:
            raise ConfigError(
                "The Trainer does not have this CheckpointerCallback; give it to Trainer(callbacks=[...])."
            )
        if trainer.is_deepspeed_enabled:
            raise ConfigError("CheckpointerCallback does not know how DeepSpeed divides a model; use FSDP or DDP.")
        self.close()
        self._trainer = trainer
        self._checkpointer = Checkpointer(
            self._path, monitor=self._monitor, processor=_StepFiles(trainer), **self._settings
        )
        try:
            with temporary_ranks(CheckpointConfig().timeout_seconds) as ranks:
                found = run_on_main(ranks, self._find)
            self._step = self._position = None if found is None else found["global_step"]
            if found is None:
                return None
            self._prepared = TemporaryDirectory(prefix="fsdp-shard-resume-")
            self._position = found["global_step"] = _position(trainer, found["global_step"])
            found["train_batch_size"] = trainer.args.train_batch_size  # per rank: other ranks may have other sizes
            _prepare(Path(self._prepared.name), trainer.model, found)
        except FsdpShardError:
            self.close()
            raise
        return self._prepared.name

    def close(self) -> None:
        """Release the run directory after a `train` that ended with an error; otherwise this is automatic."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(RuntimeError, RuntimeError("train() has ended with an error"), None)
            self._checkpointer = None
        if self._prepared is not None:
            self._prepared.cleanup()
            self._prepared = None

    # ---- the Trainer calls these, in this order

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Raise ConfigError for settings under which work would be done twice or not at all."""
        self._check(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Restore the step: everything is wrapped, and the data has not started."""
        checkpointer = self._checkpointer
        if checkpointer is None or (self._step is not None and state.global_step != self._position):
            raise ConfigError(
                "Start and resume the Trainer by trainer.train(resume_from_checkpoint=callback.resume_from(trainer)), "
                "with the CheckpointerCallback that it has."
            )
        self._epoch_random = self._step_random = None
        self._rows = digest_of_rows(given["train_dataloader"].dataset)
        # The Trainer may have resumed from its own checkpoint, whose settings are no longer known.
        self._initial_groups = (
            settings_of(given["optimizer"]) if state.global_step == 0 or self._step is not None else None
        )
        try:
            self._check_evaluations(args)
            if self._step is not None:
                restored = checkpointer.restore(given["model"], given["optimizer"], step=self._step, **_states(given))
                assert restored is not None
                state.global_step = self._step
                self._resume(args, given["train_dataloader"], restored)
                self._follow_arguments(given, restored)
        except FsdpShardError:
            self.close()
            raise
        self._saved = state.global_step
        self._epoch = _epoch(state.global_step, _steps_per_epoch(args, given["train_dataloader"])) - 1

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Record the random state, which may determine an epoch's order; in a resumed run, set it."""
        self._epoch += 1
        if self._step_random is not None:
            if self._epoch_random is not None:
                restore_random_state(self._epoch_random, str(self._path))
            else:  # the step was saved before this epoch started
                restore_random_state(self._step_random, str(self._path))
                self._step_random = None
        self._epoch_random = random_state()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save the previous step, which has only now been logged and evaluated."""
        if self._step_random is not None:
            restore_random_state(self._step_random, str(self._path))
            self._step_random = None
        checkpointer, step = self._checkpointer, state.global_step
        assert checkpointer is not None
        self._require_monitored(state)
        arguments = self._save_arguments(args, state, given, self._epoch, self._epoch_random)
        if step > self._saved and step % self._interval(args, state) == 0:
            self._save(state, given, arguments)
        if checkpointer.save_on_signal(step, given["model"], given["optimizer"], **arguments):
            self._finish()
            raise stopped(step, self._path, "train")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Save the last step, and wait until it is on disk."""
        self._require_monitored(state)
        if state.global_step > self._saved:
            steps_per_epoch = _steps_per_epoch(args, given["train_dataloader"])
            has_begun = steps_per_epoch is None or state.global_step % steps_per_epoch > 0
            epoch = self._epoch if has_begun else _epoch(state.global_step, steps_per_epoch)
            begun_with = self._epoch_random if has_begun else None
            self._save(state, given, self._save_arguments(args, state, given, epoch, begun_with))
        assert self._checkpointer is not None
        self._checkpointer.wait()
        if self._monitor is not None and state.is_world_process_zero and self._checkpointer.best is None:
            report_no_best(self._path, self._monitor)
        self._finish()

    # ---- saving and restoring

    def _check(self, args: TrainingArguments) -> None:
        for name, (needed, why) in _REFUSED.items():
            if (value := getattr(args, name, needed)) != needed:
                shown = getattr(value, "value", value)
                raise ConfigError(
                    f"TrainingArguments has {name}={shown!r}, and CheckpointerCallback needs {needed!r}: {why}."
                )

    def _find(self) -> dict[str, Any] | None:
        """The Trainer state of the last step."""
        store = StepStore(self._path / CHECKPOINTS)
        if (remote := self._settings.get("remote")) is not None:
            fetch_latest(RemoteStore(remote), store)
        if (step := store.latest()) is None:
            return None
        path = store.path(step) / TRAINER_STATE_NAME
        if not path.is_file():
            raise CheckpointError(f"{path.parent} has no {path.name}: it was not saved by a CheckpointerCallback.")
        found = parse_json(read_bounded(path, "tokenizer_bytes"), str(path))
        if not isinstance(found, dict) or found.get("global_step") != step:
            raise CheckpointError(f"{path} is not the state of the Trainer at step {step}.")
        return found

    def _resume(self, args: TrainingArguments, loader: Any, restored: Restored) -> None:
        now = self._data(args, loader)
        require_same_data(restored, now, _FACTORS)
        if restored.extra["epoch"] != _epoch(restored.step, now["steps_per_epoch"]):
            raise CheckpointError(
                f"{restored.directory} was saved in epoch {restored.extra['epoch']} (from 0), where the Trainer finds "
                f"step {restored.step} in another one: an epoch was ended early, or an IterableDataset before "
                f"max_steps. The Trainer cannot find that position again; begin a new run with its weights."
            )
        if restored.has_random_state:
            self._step_random, self._epoch_random = random_state(), restored.extra_per_rank
        elif not (restored.extra["is_of_any_ranks"] and _order_ignores_ranks(args, loader)):
            raise CheckpointError(
                f"{restored.directory} was saved by another number of ranks, and the order of this training data "
                f"depends on them. Resume it on as many ranks."
            )
        report(restored)

    def _follow_arguments(self, given: dict[str, Any], restored: Restored) -> None:
        """Continue with the optimizer and schedule that TrainingArguments define now."""
        made, now = restored.extra.get("settings"), self._initial_groups
        assert now is not None
        follow_arguments(given["optimizer"], given["lr_scheduler"], made, now, restored)
        if made is None:  # the step's settings are used, whatever they are
            self._initial_groups = None

    def _check_evaluations(self, args: TrainingArguments) -> None:
        """Raise ConfigError if `monitor` is an evaluation metric and there are no evaluations."""
        if self._monitor is not None and self._monitor.startswith("eval_") and args.eval_strategy == "no":
            raise ConfigError(
                f"CheckpointerCallback has monitor={self._monitor!r}, a metric of evaluations, and TrainingArguments "
                f"has eval_strategy='no'; set it, such as to 'steps', or remove monitor."
            )

    def _require_monitored(self, state: TrainerState) -> None:
        """Raise ConfigError if the step was evaluated without the metric `monitor`."""
        if self._monitor is None or not self._monitor.startswith("eval_"):  # other metrics may be logged at other steps
            return
        found = self._metrics(state)
        if not found or self._monitor in found:
            return
        raise ConfigError(
            f"CheckpointerCallback has monitor={self._monitor!r}{nearest(self._monitor, [*found])}, and the evaluation "
            f"of step {state.global_step} has no such metric; what was logged are {', '.join(sorted(found))}."
        )

    def _data(self, args: TrainingArguments, loader: Any) -> dict[str, Any]:
        """The values that a run's batches depend on."""
        assert self._trainer is not None
        found = data_of(loader, self._trainer.get_total_train_batch_size(args), self._rows)
        return found | {"steps_per_epoch": _steps_per_epoch(args, loader)}

    def _interval(self, args: TrainingArguments, state: TrainerState) -> int:
        if self._every is not None:
            return self._every
        return math.ceil(args.save_steps if args.save_steps >= 1 else args.save_steps * state.max_steps)

    def _save_arguments(
        self, args: TrainingArguments, state: TrainerState, given: dict[str, Any], epoch: int, epoch_random: Any
    ) -> dict[str, Any]:
        loader = given["train_dataloader"]
        extra = {
            "data": self._data(args, loader),
            "epoch": epoch,
            "settings": self._initial_groups,
            "is_of_any_ranks": _order_ignores_ranks(args, loader),
        }
        return {
            **_states(given),
            "extra": extra,
            "extra_per_rank": epoch_random,
            "metrics": self._metrics(state),
        }

    def _save(self, state: TrainerState, given: dict[str, Any], arguments: dict[str, Any]) -> None:
        assert self._checkpointer is not None
        assert self._trainer is not None
        self._trainer.store_flos()
        self._checkpointer.save(state.global_step, given["model"], given["optimizer"], **arguments)
        self._saved = state.global_step

    def _metrics(self, state: TrainerState) -> dict[str, float]:
        """The metrics logged at this step; without an evaluation, empty if `monitor` would be missing."""
        logged: dict[str, Any] = {}
        for entry in reversed(state.log_history):
            if entry["step"] != state.global_step:
                break
            logged = entry | logged
        found = {name: float(value) for name, value in logged.items() if isinstance(value, int | float)}
        is_evaluated = any(name.startswith("eval_") for name in found)
        return found if self._monitor is None or self._monitor in found or is_evaluated else {}

    def _finish(self) -> None:
        assert self._checkpointer is not None
        self._checkpointer.close()
        self.close()


class _StepFiles:
    """Files of a step besides weights that the Trainer also writes: the tokenizer's, and its own state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def save_pretrained(self, directory: str) -> None:
        """Write the files."""
        trainer = self._trainer
        if (processor := trainer.processing_class) is not None:
            processor.save_pretrained(directory)
        stateful: list[Any] = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        stateful.append(trainer.control)
        state = dataclasses.replace(trainer.state, stateful_callbacks=stateful)
        state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))


def _prepare(directory: Path, model: Any, state: dict[str, Any]) -> None:
    """Write what `train` reads before it calls the callback: the position, and weights that have no effect."""
    (directory / TRAINER_STATE_NAME).write_text(json.dumps(state))
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            model.save_pretrained(os.fspath(directory))
            return
    save_file({}, directory / _NOTHING)
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), _NOTHING)}
    (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))


def _position(trainer: Trainer, step: int) -> int:
    """The step after which the Trainer continues.

    The Trainer checks only after a step whether a run is finished, so a run that finished within an epoch would gain
    one more step with each start. Such a run starts at the end of that epoch, after which there is no step.
    """
    args = trainer.args
    if args.max_steps <= 0 and args.num_train_epochs == int(args.num_train_epochs):
        return step
    steps_per_epoch = _steps_per_epoch(args, trainer.get_train_dataloader())
    if steps_per_epoch is None:
        return step
    last = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    return step if step < last else math.ceil(step / steps_per_epoch) * steps_per_epoch


def _steps_per_epoch(args: TrainingArguments, loader: Any) -> int | None:
    """Optimizer steps per epoch; None if the data has no length."""
    return max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1) if has_length(loader) else None


def _epoch(step: int, steps_per_epoch: int | None) -> int:
    """The epoch of the step after `step`, by the Trainer's count."""
    return 0 if steps_per_epoch is None else step // steps_per_epoch


def _order_ignores_ranks(args: TrainingArguments, loader: Any) -> bool:
    """Whether the global batches are the same on any number of ranks."""
    if isinstance(loader.dataset, IterableDataset):
        is_divided = isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDatasetShard)
        return args.world_size == 1 or is_divided
    return isinstance(get_sampler(loader), SeedableRandomSampler | SequentialSampler)


def _states(given: dict[str, Any]) -> dict[str, Any]:
    """Objects with state besides model and optimizer: the schedule, and the float16 scaler."""
    return {"scheduler": given["lr_scheduler"], "scaler": getattr(given["optimizer"], "scaler", None)}
