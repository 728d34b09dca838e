"""fsdp-shard checkpoints in Lightning's Trainer: a callback that replaces ModelCheckpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.integrations.resumable_loader import ResumableLoader
from fsdp_shard.integrations.resumption import check_every, report, report_no_best, stopped
from fsdp_shard.training import Checkpointer, Restored, check_settings


class LightningCheckpoint(Checkpoint):
    """Saves the steps of `Trainer.fit` with a `Checkpointer`, and resumes from the last one.

    It resumes whenever the run directory contains a step: call `fit` the same way each time, without `ckpt_path`. The
    last step is always saved. When asked to stop (SIGTERM, SIGINT, SIGUSR1 or SIGHUP), the run saves one more step and
    ends with `Interrupted`. The callback works with every strategy whose parameters `Checkpointer` supports: one
    device, DDP, ModelParallelStrategy (FSDP2, tensor parallelism) and FSDPStrategy with `use_orig_params=True`.

    Args:
        path: The run directory.
        every: Save after this many more optimizer steps; None saves at the end of each epoch. With a number, the
            training data must be a loader with `state_dict`, such as `ResumableLoader`.
        module: The attribute of the LightningModule to save, if it holds all parameters: a transformers model is then
            saved under its own names, for `generate` and `evaluate`.
        monitor: The logged metric that determines the best step. A step saved later than the metric was logged, such
            as between two validations, cannot be the best.
        mode: `min` or `max`: whether the lowest or highest value is best.
        settings: `Checkpointer` settings, such as `keep_last=3` or `processor=tokenizer`.

    Example:
        >>> from fsdp_shard.integrations import LightningCheckpoint
        >>> Trainer(callbacks=[LightningCheckpoint("runs/mine", every=100)])  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        module: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        **settings: Any,
    ) -> None:
        check_every(every)
        other_names = ("every", "module", "monitor", "mode", "processor")
        checked = {name: value for name, value in settings.items() if name != "processor"}
        check_settings(checked, mode, kind="LightningCheckpoint", other_names=other_names)
        self._path, self._every, self._module, self._monitor = path, every, module, monitor
        self._settings = {"mode": mode, **settings}
        self._checkpointer: Checkpointer | None = None
        self._random = ExitStack()
        self._restored: Restored | None = None
        self._saved = self._seen = 0  # optimizer steps: on disk, and after the last batch
        self._listens = False
        self._logged: dict[str, tuple[torch.Tensor, int]] = {}  # each metric, and the step at which it was logged

    # ---- Lightning calls these, in this order

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError for settings under which work would be done twice or not at all."""
        if not isinstance(trainer, Trainer):
            raise ConfigError("LightningCheckpoint is for the Trainer of `lightning`, and this is another package's.")
        if stage != "fit":
            return
        for other in trainer.callbacks:
            if other is not self and isinstance(other, Checkpoint):
                raise ConfigError(
                    f"callbacks has {type(other).__name__} in addition to LightningCheckpoint, and each would save "
                    f"and resume in its own way; remove one."
                )
            if is_overridden("on_save_checkpoint", other, Callback):
                raise ConfigError(
                    f"callbacks has {type(other).__name__}, which keeps its state by on_save_checkpoint, in files of "
                    f"Lightning; LightningCheckpoint keeps what state_dict() of a callback returns."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the last step: the model is wrapped, and loops and data have not started."""
        if trainer.fast_dev_run:
            return
        if any(one.reduce_on_plateau and one.interval == "step" for one in trainer.lr_scheduler_configs):
            raise ConfigError(
                "A ReduceLROnPlateau has interval='step', whose step comes after that of the save; use 'epoch'."
            )
        self._checkpointer = Checkpointer(self._path, monitor=self._monitor, **self._settings)
        self._saved = self._seen = 0
        self._logged.clear()
        self._restored = self._checkpointer.restore(*self._parts(trainer, pl_module), **_states(trainer))
        if self._restored is not None:
            self._resume(trainer, pl_module, self._restored)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the loaders with the step, now that they exist."""
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        self._listens = all(hasattr(loader, "state_dict") for loader in loaders)
        if self._checkpointer is None:
            return
        if self._every is not None and not self._listens:
            raise ConfigError(
                f"every={self._every} saves steps within an epoch, and the training data is a "
                f"{type(loaders[0]).__name__} without state_dict(), whose position cannot be resumed. Use "
                f"ResumableLoader, or every=None."
            )
        own = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
        for loader in loaders:
            if isinstance(loader, ResumableLoader) and own is not None:
                loader.require_ranks(**own)
        if (restored := self._restored) is None:
            return
        if trainer.ckpt_path is not None:
            raise ConfigError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would replace a part of what is restored from "
                f"{self._path}, which has step {restored.step}; remove ckpt_path."
            )
        if not restored.extra["within_epoch"]:
            # Otherwise Lightning would first look for the rest of the finished epoch.
            trainer.fit_loop.epoch_loop.restarting = False
            stateful = [loader for loader in loaders if hasattr(loader, "state_dict")]
            for loader, state in zip(stateful, restored.extra["loaders"] or (), strict=False):
                if isinstance(loader, ResumableLoader):
                    loader.require_same_data(state)
            return
        if not self._listens or not (restored.has_random_state or _are_of_any_ranks(loaders)):
            raise CheckpointError(
                f"{restored.directory} was saved within an epoch, and this training data "
                + ("has no state_dict()." if not self._listens else "cannot be resumed on another number of ranks.")
                + " Use ResumableLoader from the start of the run, or resume a step of the end of an epoch."
            )
        self._random.close()  # undoes what creating the loaders' iterators drew

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End Lightning's restart state, as the loops are in place; otherwise ReduceLROnPlateau misses this epoch."""
        if self._restored is not None:
            trainer.fit_loop.on_iteration_done()
            self._restored = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save within an epoch; validation and schedulers follow its last batch, so that save comes later."""
        has_stepped, self._seen = trainer.global_step > self._seen, trainer.global_step
        is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        if has_stepped and not is_last and self._checkpointer is not None:
            ends = trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
            if ends or not _validates_after(trainer, batch_idx):
                self._save(trainer, pl_module, is_due=ends or self._has_passed(), within_epoch=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics of these weights."""
        self._note_metrics(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics of the epoch."""
        self._note_metrics(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the previous epoch."""
        if self._checkpointer is not None and trainer.global_step > self._saved:
            self._save(trainer, pl_module, is_due=self._every is None or self._has_passed(), within_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, and wait until it is on disk."""
        if self._checkpointer is not None:
            if trainer.global_step > self._saved:
                self._save(trainer, pl_module, is_due=True, within_epoch=False)
            self._checkpointer.wait()
            if self._monitor is not None and trainer.is_global_zero and self._checkpointer.best is None:
                report_no_best(self._path, self._monitor)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the run directory without waiting for ranks that may have ended."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)
        self._forget()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the run directory."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._forget()

    # ---- saving and restoring

    def _forget(self) -> None:
        self._random.close()
        self._checkpointer = self._restored = None

    def _has_passed(self) -> bool:
        return self._every is not None and self._seen // self._every > self._saved // self._every

    def _parts(self, trainer: Trainer, pl_module: LightningModule) -> tuple[Any, Any]:
        """The trained model and the optimizers."""
        model: Any = trainer.model
        if self._module is not None:
            model = getattr(pl_module, self._module, None)
            others = [name for name in pl_module.state_dict() if not name.startswith(f"{self._module}.")]
            if not isinstance(model, torch.nn.Module) or others:
                found = f"{others[0]} is outside of it" if others else "there is no such module"
                raise ConfigError(f"module={self._module!r} does not hold all of {type(pl_module).__name__}: {found}.")
        return model, {f"optimizer_{number}": one for number, one in enumerate(trainer.optimizers)}

    def _save(self, trainer: Trainer, pl_module: LightningModule, *, is_due: bool, within_epoch: bool) -> None:
        checkpointer, step = self._checkpointer, trainer.global_step
        assert checkpointer is not None
        position = trainer.fit_loop.state_dict()
        loaders = position["state_dict"].pop("combined_loader", None)
        kept: dict[str, Any] = {}
        pl_module.on_save_checkpoint(kept)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by fit
        arguments: dict[str, Any] = _states(trainer) | {
            "extra": {
                "fit_loop": position,
                "within_epoch": within_epoch,
                "loaders": loaders,
                "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
                "module": kept,
                "datamodule": None if datamodule is None else datamodule.state_dict(),
            },
            "extra_per_rank": loaders,
            "metrics": self._metrics(trainer),
        }
        model, optimizers = self._parts(trainer, pl_module)
        if is_due:
            checkpointer.save(step, model, optimizers, **arguments)
            self._saved = step
        if self._listens and checkpointer.save_on_signal(step, model, optimizers, **arguments):
            raise stopped(step, self._path, "fit")

    def _note_metrics(self, trainer: Trainer) -> None:
        """Record the step at which each metric was logged, because Lightning keeps its value until the next log."""
        for name, value in trainer.callback_metrics.items():
            if name not in self._logged or self._logged[name][0] is not value:
                self._logged[name] = value, trainer.global_step

    def _metrics(self, trainer: Trainer) -> Mapping[str, float] | None:
        self._note_metrics(trainer)
        values = {name: float(value) for name, (value, step) in self._logged.items() if step == trainer.global_step}
        if self._monitor is not None and self._monitor not in values:
            values = {}  # it was not logged at this step
        agreed: Mapping[str, float] = trainer.strategy.broadcast(values)  # each rank may have logged its own
        return agreed

    def _resume(self, trainer: Trainer, pl_module: LightningModule, restored: Restored) -> None:
        extra = restored.extra
        self._saved = self._seen = restored.step
        position = extra["fit_loop"]
        loaders = extra["loaders"] if restored.extra_per_rank is None else restored.extra_per_rank
        if extra["within_epoch"] and loaders:
            position["state_dict"]["combined_loader"] = loaders
        trainer.fit_loop.load_state_dict(position)
        for one in trainer.callbacks:
            if one.state_key in extra["callbacks"]:
                one.load_state_dict(extra["callbacks"][one.state_key])
        pl_module.on_load_checkpoint(extra["module"])
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by fit
        if datamodule is not None and extra["datamodule"] is not None:
            datamodule.load_state_dict(extra["datamodule"])
        if extra["within_epoch"]:
            self._random.enter_context(isolate_rng())
        report(restored)


def _states(trainer: Trainer) -> dict[str, Any]:
    """Objects whose state is equal on all ranks: schedulers, and the float16 scaler."""
    schedulers = {f"scheduler_{number}": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
    return schedulers | ({"precision": trainer.precision_plugin} if trainer.precision_plugin.state_dict() else {})


def _validates_after(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a validation within the epoch follows this batch, which resuming would not repeat."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    done = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return (done + 1) % int(every) == 0


def _are_of_any_ranks(loaders: list[Any]) -> bool:
    return all(isinstance(loader, ResumableLoader) for loader in loaders)
