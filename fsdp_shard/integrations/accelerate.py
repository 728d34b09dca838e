"""fsdp-shard checkpoints in accelerate loops, instead of `accelerator.save_state` and `load_state`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler, get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.integrations.resumption import data_of, digest_of_rows, has_length, report, require_same_data
from fsdp_shard.training import Checkpointer, Restored, random_state, restore_random_state

_FACTORS = "of a batch of all ranks x gradient_accumulation_steps"


class AcceleratorCheckpointer:
    """Saves and restores the objects an `Accelerator` prepared, and the data position; all ranks call each method.

    Args:
        path: The run directory. No other run can use it at the same time.
        accelerator: The Accelerator; its gradient scaler is saved too.
        prepared: The objects that `accelerator.prepare` returned, in a fixed order of your choice: models, optimizers,
            schedulers and the training data loader. Further objects with `state_dict` and `load_state_dict`, as for
            `register_for_checkpointing`, are accepted too.
        settings: `Checkpointer` settings, such as `keep_last=3`, `monitor="loss"` or `processor=tokenizer`.

    Raises:
        ConfigError: An object cannot be saved, or the data position could not be restored.

    Example:
        >>> from fsdp_shard.integrations import AcceleratorCheckpointer
        >>> prepared = accelerator.prepare(model, optimizer, loader, scheduler)  # doctest: +SKIP
        >>> with AcceleratorCheckpointer("runs/mine", accelerator, *prepared) as checkpointer:  # doctest: +SKIP
        ...     restored = checkpointer.restore()
        ...     step = restored.step if restored else 0
        ...     for epoch in range(checkpointer.epoch, num_epochs):
        ...         for batch in checkpointer.batches():
        ...             ...
        ...             step += 1
        ...             checkpointer.save(step)
    """

    def __init__(self, path: str | os.PathLike[str], accelerator: Accelerator, *prepared: Any, **settings: Any) -> None:
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"AcceleratorCheckpointer does not know how {accelerator.distributed_type.value} divides a model; use "
                f"FSDP or DDP."
            )
        self._accelerator = accelerator
        models = [one for one in prepared if isinstance(one, nn.Module)]
        self._models = _single_or_by_name("model", models)
        self._optimizers = _single_or_by_name("optimizer", [one for one in prepared if isinstance(one, Optimizer)])
        loaders = [one for one in prepared if isinstance(one, DataLoader)]
        known = (nn.Module, Optimizer, DataLoader)
        others = [one for one in prepared if not isinstance(one, known)]
        for one in others:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigError(
                    f"{type(one).__name__} cannot be saved: it has not both state_dict() and load_state_dict()."
                )
        if not models or len(loaders) > 1:
            raise ConfigError(
                f"AcceleratorCheckpointer was given {len(models)} models and {len(loaders)} loaders; it takes at "
                f"least one model, and the loader of the training data only."
            )
        self._schedulers = [one for one in others if isinstance(one, AcceleratedScheduler)]
        self._states = {f"object_{number}": one for number, one in enumerate(others)} | {"scaler": accelerator.scaler}
        self._loader = loaders[0] if loaders else None
        if self._loader is not None:
            _check_loader(self._loader)
            self._rows = digest_of_rows(self._loader.dataset)
        self._epoch = self._next_batch = 0
        self._random: Any = None
        self._checkpointer = Checkpointer(path, **settings)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next call of `batches` belongs to."""
        return self._epoch

    @property
    def latest(self) -> int | None:
        """The highest saved step."""
        return self._checkpointer.latest

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        return self._checkpointer.steps

    def batches(self) -> Iterator[Any]:
        """Yield the epoch's remaining batches: all of them, except in the epoch of a restored step."""
        if self._loader is None:
            raise ConfigError("AcceleratorCheckpointer was not given a loader; give what accelerator.prepare returned.")
        loader: Any = self._loader
        loader.set_epoch(self._epoch)
        if self._next_batch:
            loader = self._accelerator.skip_first_batches(loader, self._next_batch)
        for batch in loader:
            if self._random is not None:
                restore_random_state(self._random, "The step")  # creating the iterator drew from it once more
                self._random = None
            self._next_batch += 1
            yield batch
        self._epoch, self._next_batch = self._epoch + 1, 0

    def save(self, step: int, *, extra: Any = None, extra_per_rank: Any = None, metrics: Any = None) -> None:
        """Save a step, as `Checkpointer.save` does. Call it after an optimizer step, not between accumulated gradients.

        Args:
            step: The number of the step, which must not be saved already.
            extra: Data from rank 0.
            extra_per_rank: Data from each rank.
            metrics: Metrics of the step.

        Raises:
            SaveError: As in `Checkpointer.save`.
            ConfigError: Gradients are being accumulated, and would be lost.
        """
        if not self._accelerator.sync_gradients:
            raise ConfigError(
                f"Step {step} was to be saved while gradients are accumulated, which are not saved; save when "
                f"accelerator.sync_gradients is True."
            )
        self._checkpointer.save(step, **self._arguments(extra), extra_per_rank=extra_per_rank, metrics=metrics)

    def save_on_signal(self, step: int, *, extra: Any = None, extra_per_rank: Any = None, metrics: Any = None) -> bool:
        """Save a step if a rank was asked to stop, as `Checkpointer.save_on_signal` does; True means: end the loop.

        While gradients accumulate, the save waits for the optimizer step.
        """
        if not self._accelerator.sync_gradients:
            return False
        return self._checkpointer.save_on_signal(
            step, **self._arguments(extra), extra_per_rank=extra_per_rank, metrics=metrics
        )

    def restore(self, *, step: int | str = "latest") -> Restored | None:
        """Restore everything from a step, as `Checkpointer.restore` does, and advance to its data position.

        Args:
            step: The step, `latest` or `best`.

        Returns:
            The restored state, including the `extra` passed to `save`; None if no step is saved.

        Raises:
            CheckpointError: The step is damaged or missing, or belongs to another model, optimizer, objects or batches.
        """
        restored = self._checkpointer.restore(self._models, self._optimizers, step=step, **self._states)
        if restored is None:
            return None
        require_same_data(restored, self._data(), _FACTORS)
        kept, num_processes = restored.extra, self._accelerator.num_processes
        if kept["num_processes"] != num_processes and any(map(_steps_for_each_process, self._schedulers)):
            raise CheckpointError(
                f"{restored.directory} was saved by {kept['num_processes']} processes, and now there are "
                f"{num_processes}: the scheduler does one step for each of them. Run it with "
                f"DataLoaderConfiguration(split_batches=True) or Accelerator(step_scheduler_with_optimizer=False) from "
                f"its start, or resume it with as many."
            )
        self._epoch, self._next_batch = kept["epoch"], 0
        if self._loader is not None:
            self._next_batch = kept["next_sample"] // _total_batch_size(self._loader)
        self._random = random_state() if restored.has_random_state and self._next_batch else None
        report(restored)
        return dataclasses.replace(restored, extra=kept["extra"])

    def wait(self) -> None:
        """Wait until the last step is on disk; raises SaveError if it could not be saved."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait for the last step and release the directory, as leaving the `with` block does."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        self._checkpointer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.__exit__(kind, error, trace)

    def _arguments(self, extra: Any) -> dict[str, Any]:
        epoch, next_batch = self._epoch, self._next_batch
        if self._loader is not None and has_length(self._loader) and next_batch == len(self._loader):
            epoch, next_batch = epoch + 1, 0
        kept = {
            "data": self._data(),
            "epoch": epoch,
            "next_sample": next_batch * _total_batch_size(self._loader) if self._loader is not None else 0,
            "num_processes": self._accelerator.num_processes,
            "extra": extra,
        }
        return {"model": self._models, "optimizer": self._optimizers, "extra": kept, **self._states}

    def _data(self) -> dict[str, Any]:
        """The values that a run's batches depend on."""
        if self._loader is None:
            return {}
        global_batch_size = _total_batch_size(self._loader) * self._accelerator.gradient_accumulation_steps
        return data_of(self._loader, global_batch_size, self._rows)


def _check_loader(loader: Any) -> None:
    """Raise ConfigError for a loader whose position could not be restored."""
    if not isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        raise ConfigError(f"{type(loader).__name__} is not prepared; give what accelerator.prepare returned of it.")
    if loader.use_stateful_dataloader:
        raise ConfigError(
            "DataLoaderConfiguration has use_stateful_dataloader=True, and AcceleratorCheckpointer finds the position "
            "itself; remove it."
        )
    sampler = get_sampler(loader)
    is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if is_random and not isinstance(sampler, SeedableRandomSampler):
        raise ConfigError(
            f"The order of the loader is one that {type(sampler).__name__} draws, which could not be found again "
            f"within an epoch; use shuffle=True with DataLoaderConfiguration(use_seedable_sampler=True)."
        )


def _total_batch_size(loader: Any) -> int:
    """Samples per batch over all ranks."""
    return int(loader.total_batch_size)


def _steps_for_each_process(scheduler: AcceleratedScheduler) -> bool:
    return bool(scheduler.step_with_optimizer and not scheduler.split_batches)


def _single_or_by_name(name: str, objects: list[Any]) -> Any:
    """Return a single object unchanged, and several objects by name."""
    if len(objects) <= 1:
        return objects[0] if objects else None
    return {f"{name}_{number}": one for number, one in enumerate(objects)}
