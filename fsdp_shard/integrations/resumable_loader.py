"""A data loader that can resume within an epoch on any number of ranks. It needs only torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.utils import whole_number


class ResumableLoader:
    """A DataLoader whose position can be resumed within an epoch, on any number of ranks.

    Each batch is a consecutive part of one dataset order, and each rank takes its part of the batch. Steps are
    therefore identical on any number of ranks that divides `global_batch_size`. An incomplete batch at the end of an
    epoch is dropped.

    With `num_workers`, the workers' global random states (of Python, NumPy and torch on the CPU) are seeded for each
    batch by the seed, the epoch, the batch and the rank. Without, rows draw from the random state of this process.

    Args:
        dataset: The dataset, with `__len__` and `__getitem__`.
        global_batch_size: Samples per batch over all ranks.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders.
        num_replicas: Number of ranks with different samples; by default, all ranks. With tensor parallelism, pass
            `**trainer.strategy.distributed_sampler_kwargs`.
        rank: The index of this rank among them.
        options: Options of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.

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
        _require_int("global_batch_size", global_batch_size, 1)
        for name, value, least in (("num_replicas", num_replicas, 1), ("rank", rank, 0)):
            if value is not None:
                _require_int(name, value, least)
        if not isinstance(dataset, Sized) or len(dataset) < global_batch_size:
            found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
            raise ConfigError(f"dataset has {found}, and global_batch_size={global_batch_size} is at least needed.")
        if reserved := sorted(options.keys() & {"batch_size", "sampler", "batch_sampler", "drop_last", "generator"}):
            raise ConfigError(f"{reserved[0]} is not an option of ResumableLoader: it divides the batches itself.")
        self._dataset: Any = dataset
        self._global_batch_size, self._shuffle, self._seed, self._options = global_batch_size, shuffle, seed, options
        self._given = (num_replicas, rank)
        self._epoch = self._next = 0
        self._is_set = False  # whether the next iteration is of this epoch, even if nothing is left of it
        self._rows = _digest_of_rows(dataset)

    @property
    def epoch(self) -> int:
        """The current epoch, or that of the next iteration once the current one is exhausted."""
        return self._epoch

    @property
    def sampler(self) -> Self:
        """The object with `set_epoch`: Lightning and Fabric call it where a DataLoader has its sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; if it is the current one, it continues."""
        if epoch != self._epoch:
            self._epoch, self._next = epoch, 0
        self._is_set = True

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._dataset) // self._global_batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of the batches, starting at the position.

        If all batches of the epoch have been yielded, the next epoch begins, unless `set_epoch` or `load_state_dict`
        has since named this one.
        """
        if self._next >= len(self) and not self._is_set:  # a loop may stop at the last batch
            self._epoch, self._next = self._epoch + 1, 0
        self._is_set = False
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        num_replicas, rank = self._ranks()
        order = torch.arange(len(self._dataset))
        if self._shuffle:
            order = torch.randperm(len(order), generator=generator)
        batches = order[: len(self) * self._global_batch_size].view(len(self), num_replicas, -1)[:, rank].tolist()
        dataset, left = self._dataset, batches[self._next :]
        if self._options.get("num_workers"):
            dataset = _SeededInWorkers(dataset, f"{self._seed} {self._epoch} {rank}")
            left = list(enumerate(left, start=self._next))
        for batch in DataLoader(dataset, batch_sampler=left, generator=generator, **self._options):
            self._next += 1
            yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, which is equal on all ranks."""
        rows = {} if self._rows is None else {"rows": self._rows}
        return {"epoch": self._epoch, "next_batch": self._next, **self._identity(), **rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; raises CheckpointError if it is none, or belongs to other batches."""
        self.require_same_data(state)
        epoch, position = state.get("epoch"), state.get("next_batch")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self):
            raise CheckpointError(
                f"The state has epoch={epoch!r} and next_batch={position!r}, which is no position of ResumableLoader: "
                f"expected ints, an epoch from 0 on and one of 0 to {len(self)} batches; load what its state_dict() "
                f"returned."
            )
        self._epoch, self._next, self._is_set = epoch, position, True  # a finished epoch does not run again

    def require_same_data(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless a state is that of a loader with the same batches."""
        rows = state.get("rows")  # missing from earlier versions, and for data other than datasets.Dataset
        if self._rows is not None and rows is not None and rows != self._rows:
            raise CheckpointError(
                f"The step was saved with other data: the names of columns and some of the rows have the digest "
                f"{rows}, and now {self._rows}, so that the batches that follow would be others. Use the same data."
            )
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"The step was saved with {name}={state.get(name)!r} of ResumableLoader, and now it is {value!r}: "
                    f"the batches that follow would be others. Use the same."
                )

    def require_ranks(self, num_replicas: int, rank: int) -> None:
        """Raise ConfigError unless the batches are divided among exactly these ranks."""
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
        if rank >= num_replicas:
            raise ConfigError(
                f"rank={rank} of ResumableLoader is not one of num_replicas={num_replicas} ranks, which are numbered "
                f"from 0; correct one of them."
            )
        if self._global_batch_size % num_replicas:
            raise ConfigError(
                f"global_batch_size={self._global_batch_size} is not divisible by the {num_replicas} ranks that share "
                f"it; use a multiple."
            )
        return num_replicas, rank


class _SeededInWorkers(Dataset[Any]):
    """The rows of `dataset`, for which a worker's random state is seeded batch by batch.

    DataLoader seeds a worker once: what it draws for a batch depends on the batches that it has read before. A
    `worker_init_fn` may read and set the dataset's attributes through it.

    Args:
        dataset: The dataset.
        seed: The seed, the epoch and the rank.
    """

    _rows: Any
    _batch_seed: str

    def __init__(self, dataset: Any, seed: str) -> None:
        vars(self).update(_rows=dataset, _batch_seed=seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_rows":  # of pickle, which asks before there are attributes
            raise AttributeError(name)
        return getattr(self._rows, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._rows, name, value)

    def __getitems__(self, numbered: tuple[int, Sequence[int]]) -> Sequence[Any]:
        """Return the rows of a batch, given its number and their indices; DataLoader calls this in a worker."""
        number, indices = numbered
        random.seed(f"{self._batch_seed} {number}")
        torch.default_generator.manual_seed(random.getrandbits(63))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))
        if hasattr(self._rows, "__getitems__"):
            rows: Sequence[Any] = self._rows.__getitems__(indices)
            return rows
        return [self._rows[index] for index in indices]


def _require_int(name: str, value: Any, least: int) -> None:
    number = whole_number(value)
    if number is None or number < least:
        raise ConfigError(f"{name}={value!r} of ResumableLoader is not an int from {least} on; give one.")


def _digest_of_rows(data: Any) -> str | None:
    """Digest of the columns and some rows of a `datasets.Dataset`; None for other data."""
    if "datasets" not in sys.modules:  # then it is other data, and torch suffices
        return None
    from fsdp_shard.integrations.resumption import digest_of_rows

    return digest_of_rows(data)
