"""Checkpoints of fsdp-shard in Lightning's Trainer: a callback in the place of ModelCheckpoint, and a loader that is
resumed within an epoch on any number of ranks.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sized
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from fsdp_shard.errors import CheckpointError, ConfigError, Interrupted
from fsdp_shard.training import Checkpointer, Restored

_logger = logging.getLogger("fsdp_shard")


class LightningCheckpoint(Checkpoint):
    """Saves the steps of `Trainer.fit` through a `Checkpointer`, and goes on with the last one.

    It resumes whenever the run directory has a step: `fit` is called the same way each time, without `ckpt_path`. The
    last step is saved in any case, and one more when the run is asked to stop (SIGTERM, SIGINT, SIGUSR1 or SIGHUP),
    which ends it by `Interrupted`. It works with every strategy whose parameters a `Checkpointer` knows: one device,
    DDP, ModelParallelStrategy (FSDP2, tensor parallelism) and FSDPStrategy with `use_orig_params=True`.

    Args:
        path: The run directory.
        every: Save whenever so many more optimizer steps are done; None at the end of each epoch. With a number, the
            training data must be a loader that has `state_dict`, such as `ResumableLoader`.
        module: The attribute of the LightningModule that is saved, if it holds all parameters: a model of transformers
            is then saved under its own names, for `generate` and `evaluate`.
        monitor: The logged metric by which a step is the best.
        settings: Those of `Checkpointer`, such as `keep_last=3`, `mode="max"` or `processor=tokenizer`.

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
        **settings: Any,
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"every={every!r} is neither a number of steps of at least 1 nor None.")
        self._path, self._every, self._module, self._monitor = path, every, module, monitor
        self._settings = settings
        self._checkpointer: Checkpointer | None = None
        self._random = ExitStack()
        self._restored: Restored | None = None
        self._saved = self._seen = 0  # optimizer steps: that are on the disk, and after the last batch
        self._listens = False

    # ---- Lightning calls these, in this order

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would be done twice or not at all."""
        if not isinstance(trainer, Trainer):
            raise ConfigError("LightningCheckpoint is for the Trainer of `lightning`, and this is another package's.")
        if stage != "fit":
            return
        for other in trainer.callbacks:
            if other is not self and isinstance(other, Checkpoint):
                raise ConfigError(
                    f"callbacks has {type(other).__name__} beside LightningCheckpoint, and each would save and resume "
                    f"in its own way; remove one."
                )
            if is_overridden("on_save_checkpoint", other, Callback):
                raise ConfigError(
                    f"callbacks has {type(other).__name__}, which keeps its state by on_save_checkpoint, in files of "
                    f"Lightning; LightningCheckpoint keeps what state_dict() of a callback returns."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the last step: the model is wrapped, and the loops and the data have not begun."""
        if trainer.fast_dev_run:
            return
        if any(one.reduce_on_plateau and one.interval == "step" for one in trainer.lr_scheduler_configs):
            raise ConfigError(
                "A ReduceLROnPlateau has interval='step', whose step comes after that of the save; use 'epoch'."
            )
        self._checkpointer = Checkpointer(self._path, monitor=self._monitor, **self._settings)
        self._saved = self._seen = 0
        self._restored = self._checkpointer.restore(*self._parts(trainer, pl_module), **_states(trainer))
        if self._restored is not None:
            self._resume(trainer, pl_module, self._restored)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the loaders with the step, now that there are some."""
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
                f"{self._path}, which has step {restored.step}; leave ckpt_path out."
            )
        if not restored.extra["within_epoch"]:
            # Otherwise Lightning would first look for the rest of the epoch that is over.
            trainer.fit_loop.epoch_loop.restarting = False
            return
        if not self._listens or not (restored.has_random_state or _are_of_any_ranks(loaders)):
            raise CheckpointError(
                f"{restored.directory} was saved within an epoch, and this training data "
                + ("has no state_dict()." if not self._listens else "cannot be resumed on another number of ranks.")
                + " Use ResumableLoader from the start of the run, or resume a step of the end of an epoch."
            )
        self._random.close()  # what making the loaders' iterators has drawn is undone

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The loops have found their place; while they call it a restart, a ReduceLROnPlateau misses this epoch."""
        if self._restored is not None:
            trainer.fit_loop.on_iteration_done()
            self._restored = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save within an epoch; its last batch is followed by validation and schedulers, so that save is later."""
        has_stepped, self._seen = trainer.global_step > self._seen, trainer.global_step
        is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        if has_stepped and not is_last and self._checkpointer is not None:
            ends = trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
            if ends or not _validates_after(trainer, batch_idx):
                self._save(trainer, pl_module, is_due=ends or self._has_passed(), within_epoch=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the epoch before."""
        if self._checkpointer is not None and trainer.global_step > self._saved:
            self._save(trainer, pl_module, is_due=self._every is None or self._has_passed(), within_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, and wait for it."""
        if self._checkpointer is not None:
            if trainer.global_step > self._saved:
                self._save(trainer, pl_module, is_due=True, within_epoch=False)
            self._checkpointer.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the run directory without waiting for ranks that may be gone."""
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
        """The model as it is trained, and the optimizers."""
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
            raise Interrupted(
                f"The run was asked to stop; step {step} is saved in {self._path}. The same call of fit resumes it.",
                signal_number=signal.SIGTERM,
            )

    def _metrics(self, trainer: Trainer) -> Mapping[str, float] | None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._monitor is not None and self._monitor not in values:
            values = {}  # before the first validation
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
        if not restored.has_random_state:
            _logger.warning(
                "%s was saved by another number of ranks: the random state of each rank (dropout) begins anew.",
                restored.directory,
            )
        _logger.info("resumed from %s", restored.directory)


class ResumableLoader:
    """A DataLoader whose position can be resumed within an epoch, on any number of ranks.

    Each batch is a consecutive part of one order of the data set, and each rank takes its part of the batch: the steps
    are the same ones on any number of ranks that divides `global_batch_size`. What is left at the end of an epoch and
    is no whole batch is left out.

    Args:
        dataset: The data set, which has `__len__` and `__getitem__`.
        global_batch_size: Samples of one batch of all ranks together.
        shuffle: Whether each epoch has an order of its own.
        seed: What the orders depend on.
        num_replicas: Ranks that take different samples; by default, all ranks. With tensor parallelism, give
            `**trainer.strategy.distributed_sampler_kwargs`.
        rank: The number of this one among them.
        options: Those of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.

    Example:
        >>> from fsdp_shard.integrations import ResumableLoader
        >>> [batch.tolist() for batch in ResumableLoader([1, 2, 3, 4], global_batch_size=2)]  # doctest: +SKIP
        [[1, 2], [3, 4]]
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Sized) or len(dataset) < global_batch_size:
            found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
            raise ConfigError(f"dataset has {found}, and global_batch_size={global_batch_size} is at least needed.")
        if reserved := sorted(options.keys() & {"batch_size", "sampler", "batch_sampler", "drop_last", "generator"}):
            raise ConfigError(f"{reserved[0]} is not an option of ResumableLoader: it divides the batches itself.")
        self._dataset: Any = dataset
        self._global_batch_size, self._shuffle, self._seed, self._options = global_batch_size, shuffle, seed, options
        self._given = (num_replicas, rank)
        self._epoch = self._next = 0

    @property
    def epoch(self) -> int:
        """The epoch that it is in, or that the next iteration is."""
        return self._epoch

    @property
    def sampler(self) -> Self:
        """What has `set_epoch`: Lightning and Fabric call it where a DataLoader has its sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that it is in already goes on."""
        if epoch != self._epoch:
            self._epoch, self._next = epoch, 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._dataset) // self._global_batch_size

    def __iter__(self) -> Iterator[Any]:
        """This rank's part of the batches from the position on."""
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        num_replicas, rank = self._ranks()
        order = torch.arange(len(self._dataset))
        if self._shuffle:
            order = torch.randperm(len(order), generator=generator)
        batches = order[: len(self) * self._global_batch_size].view(len(self), num_replicas, -1)[:, rank].tolist()
        for batch in DataLoader(
            self._dataset, batch_sampler=batches[self._next :], generator=generator, **self._options
        ):
            self._next += 1
            yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, which is the same on all ranks."""
        return {"epoch": self._epoch, "next_batch": self._next, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position; CheckpointError if it is one of other batches."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"The step was saved with {name}={state.get(name)!r} of ResumableLoader, and now it is {value!r}: "
                    f"the batches that follow would be others. Use the same."
                )
        self._epoch, self._next = int(state["epoch"]), int(state["next_batch"])

    def require_ranks(self, num_replicas: int, rank: int) -> None:
        """Raise ConfigError unless the batches are divided among these ranks."""
        if self._ranks() != (num_replicas, rank):
            raise ConfigError(
                f"ResumableLoader divides batches as rank {self._ranks()[1]} of {self._ranks()[0]}, where the strategy "
                f"has {rank} of {num_replicas}; give it **trainer.strategy.distributed_sampler_kwargs."
            )

    def _identity(self) -> dict[str, Any]:
        names = {"global_batch_size": self._global_batch_size, "shuffle": self._shuffle, "seed": self._seed}
        return {**names, "num_samples": len(self._dataset)}

    def _ranks(self) -> tuple[int, int]:
        is_one = not dist.is_initialized()
        num_replicas = self._given[0] or (1 if is_one else dist.get_world_size())
        rank = self._given[1] if self._given[1] is not None else 0 if is_one else dist.get_rank()
        if self._global_batch_size % num_replicas:
            raise ConfigError(
                f"global_batch_size={self._global_batch_size} is not divisible by the {num_replicas} ranks that share "
                f"it; use a multiple."
            )
        return num_replicas, rank


def _states(trainer: Trainer) -> dict[str, Any]:
    """What has a state that is the same on all ranks: schedulers, and the scaler of float16."""
    schedulers = {f"scheduler_{number}": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
    return schedulers | ({"precision": trainer.precision_plugin} if trainer.precision_plugin.state_dict() else {})


def _validates_after(trainer: Trainer, batch_idx: int) -> bool:
    """Whether this batch is followed by a validation within the epoch, which resuming would not repeat."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    done = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return (done + 1) % int(every) == 0


def _are_of_any_ranks(loaders: list[Any]) -> bool:
    return all(isinstance(loader, ResumableLoader) for loader in loaders)
