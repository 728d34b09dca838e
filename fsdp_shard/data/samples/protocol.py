"""The interfaces of datasets: samples by position in one endless order for training, by index for evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Self

import numpy as np

from fsdp_shard.data.sample_order import permutation
from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, Sample, collate
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import whole_number


class MapDataset(ABC):
    """Samples by index, each of up to `sequence_length` tokens."""

    sequence_length: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Return a sample as it is in this epoch; in the sample NO_WINDOW every label is ignored.

        Raises:
            IndexError: There is no such sample.
        """

    @abstractmethod
    def head(self, num_samples: int | None) -> Self:
        """Return the first `num_samples` samples, or all of them if None."""

    def batch(self, indices: Indices) -> Batch:
        """Stack the samples with these indices, as they are in the first epoch."""
        return collate([self.sample(int(index)) for index in indices])

    @property
    def sources(self) -> list[SourceDataset]:
        """The underlying datasets, in order; empty if there are none."""
        return []

    def with_sources(self, sources: Sequence[SourceDataset]) -> MapDataset:
        """Return the same dataset with other `sources` of equal lengths."""
        return self

    @property
    def num_predictions(self) -> int:
        """Number of trained labels, over all samples."""
        return sum(self.batch([index]).num_predictions for index in range(len(self)))


class SourceDataset(MapDataset):
    """The samples of one source, which can be split."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Equal for two datasets exactly if all of their samples are equal."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """A description of the samples, to print."""

    @abstractmethod
    def slice(self, first: int, last: int) -> Self:
        """Return samples [first, last)."""

    @abstractmethod
    def _sample(self, index: int | None, epoch: int) -> Sample:
        """Return a sample; None is one in which every label is ignored."""

    def sample(self, index: int, epoch: int = 0) -> Sample:
        if not NO_WINDOW <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._sample(None if index == NO_WINDOW else index, epoch)

    def head(self, num_samples: int | None) -> Self:
        return self if num_samples is None or num_samples >= len(self) else self.slice(0, num_samples)

    @property
    def sources(self) -> list[SourceDataset]:
        return [self]

    def with_sources(self, sources: Sequence[SourceDataset]) -> SourceDataset:
        (source,) = sources
        return source


class Dataset(ABC):
    """Samples by position in the endless order of training: everything that training needs to know about data.

    The defaults are those of a dataset with a single source whose state follows from the number of samples.

    Attributes:
        sequence_length: The maximum number of tokens in a sample.
        identity: Equal for two datasets exactly if all of their samples are equal; stored in checkpoints.
        num_samples: Samples in an epoch; None for a stream, whose length is unknown.
        source_names: The names of the sources of a mixture; empty for other datasets.
    """

    sequence_length: int
    identity: str
    num_samples: int | None
    source_names: tuple[str, ...] = ()

    @abstractmethod
    def sample(self, position: int) -> Sample:
        """Return the sample at this position."""

    def batch(self, positions: Indices) -> Batch:
        """Stack the samples at these positions."""
        return collate([self.sample(int(position)) for position in positions])

    @property
    def sources(self) -> list[SourceDataset]:
        """The underlying datasets, in order; empty for a stream, whose samples are created during training."""
        return []

    def with_sources(self, sources: Sequence[SourceDataset]) -> Dataset:
        """Return the same order of samples, from the start, with other `sources`.

        Args:
            sources: Replacements with the same samples, which may have further values.
        """
        return self

    def prepare(self, first: int, count: int) -> None:  # noqa: B027  # most datasets are always ready
        """Make the samples at positions `first` to `first + count - 1` ready.

        A collective: every rank prepares the same samples, one global batch after the other, because streams exchange
        tokenized rows.
        """

    def describe(self, positions: Iterable[int]) -> str:
        """Describe the samples so that users can find them in the data."""
        return str(sorted({int(position) for position in positions}))

    def sources_of(self, positions: Ints) -> Ints:
        """Return the number of the source of each sample, in the order of `source_names`; a single source is 0."""
        return np.zeros_like(positions)

    def figures(self, num_samples: int) -> dict[str, Any]:
        """Return the figures for result.json on the first `num_samples` samples: `sources`, `stream` or nothing."""
        return {}

    def describe_progress(self, num_samples: int, state: dict[str, Any] | None) -> str:
        """Describe a run's position in the data after `num_samples` samples, from the result of `state_dict`.

        Raises:
            CheckpointError: The state is invalid.
        """
        return f"epoch {num_samples / self.num_samples:.3g}" if self.num_samples else ""

    def state_dict(self, num_samples: int) -> dict[str, Any] | None:
        """Return the state to resume from after `num_samples` samples, as JSON and equal on all ranks.

        None if the number of samples is all that is needed.
        """
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:  # noqa: B027  # most datasets have no state
        """Continue from the result of `state_dict`; None is the start."""


class ShuffledDataset(Dataset):
    """The samples of `dataset`, epoch after epoch; each epoch is a permutation of all of them.

    It is a function of the seed and the epoch alone, and so the same for any number of ranks, micro-batch size and
    restart: a run resumes from the number of samples that it has consumed.

    A subclass whose `index_of` is a function of the position, and of `seed`, is another order with these properties.
    """

    def __init__(self, dataset: SourceDataset, seed: int) -> None:
        if not len(dataset):
            raise ValueError("there are no samples to order")
        self.dataset, self.num_samples, self.seed = dataset, len(dataset), seed
        self.sequence_length, self.identity = dataset.sequence_length, dataset.identity
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(len(dataset), seed, epoch))

    @property
    def sources(self) -> list[SourceDataset]:
        return [self.dataset]

    def with_sources(self, sources: Sequence[SourceDataset]) -> Self:
        (source,) = sources
        other = copy(self)  # also of a subclass, whose constructor and identity may be its own
        other.dataset = source
        return other

    def index_of(self, position: int) -> int:
        """Return the index in `dataset` of the sample at this position."""
        epoch, index = divmod(position, len(self.dataset))
        return int(self._order(epoch)[index])

    def sample(self, position: int) -> Sample:
        found = self.index_of(position)
        index = whole_number(found)
        if index is None or not 0 <= index < len(self.dataset):
            raise ConfigError(
                f"{type(self).__name__}.index_of({position}) returned {found!r}; it must return the index of a sample, "
                f"an int from 0 to {len(self.dataset) - 1}."
            )
        return self.dataset.sample(index, position // len(self.dataset))

    def describe(self, positions: Iterable[int]) -> str:
        return super().describe(self.index_of(int(position)) for position in positions)
