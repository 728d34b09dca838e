"""What a dataset offers: samples by index, their order, their sources, a state to resume from, and figures."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from fsdp_shard.data.sample_order import sample_indices
from fsdp_shard.data.samples.batch import MASKED, Batch, Indices, Ints


class Dataset(ABC):
    """Samples by index, and the one order in which they are trained: all that training needs to know about data.

    The defaults are those of a dataset with a single source whose position follows from the number of samples.

    Attributes:
        sequence_length: The maximum number of tokens in a sample.
    """

    sequence_length: int

    @property
    @abstractmethod
    def identity(self) -> str:
        """Equal for two datasets exactly if all of their samples are equal; stored in checkpoints."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """How the samples are laid out, for people."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Samples in an epoch; None for a stream, whose length is unknown."""

    @abstractmethod
    def order(self, seed: int, first: int, count: int) -> Ints:
        """Return the indices [count] of samples `first` to `first + count - 1` of the endless order of training.

        Every rank asks for the same samples, one global batch after the other: streams exchange what they tokenized.
        """

    @abstractmethod
    def batch(self, indices: Indices) -> Batch:
        """Stack the samples with these indices; every label of `NO_WINDOW` is masked."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources of a mixture; empty for other datasets."""
        return ()

    def sources_of(self, indices: Ints) -> Ints:
        """Return the position in `source_names` of the source of each sample."""
        raise NotImplementedError("only mixtures have sources")

    def figures(self, num_samples: int) -> dict[str, Any]:
        """Return what result.json has about the first `num_samples` samples: `sources` or `stream`, or nothing."""
        return {}

    def state_dict(self, num_samples: int) -> dict[str, Any] | None:
        """Return the state to resume from after `num_samples` samples, as JSON and equal on all ranks.

        None if the number of samples is all that is needed.
        """
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:  # noqa: B027  # most datasets have no state
        """Continue from what `state_dict` returned; None is the beginning."""


class MapDataset(Dataset):
    """A dataset of known length, which can be divided."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def slice(self, first: int, last: int) -> Self:
        """Return samples [first, last)."""

    @property
    def num_samples(self) -> int:
        return len(self)

    @property
    def num_predictions(self) -> int:
        """Number of labels that are not masked, over all samples."""
        return sum(self.batch([index]).num_predictions for index in range(len(self)))

    def order(self, seed: int, first: int, count: int) -> Ints:
        return sample_indices(seed, len(self), first, count)

    def head(self, num_samples: int | None) -> Self:
        """Return the first `num_samples` samples, or all of them if None."""
        return self if num_samples is None or num_samples >= len(self) else self.slice(0, num_samples)

    def checked(self, index: int) -> int:
        """Return `index`; raise IndexError if there is no such sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index


def source_predictions(dataset: Dataset, samples: Iterable[Ints], batches: Sequence[Batch]) -> list[int]:
    """Count the labels of each source of a mixture.

    Args:
        dataset: The dataset of the samples.
        samples: Indices of the samples of each batch.
        batches: The batches.

    Returns:
        The number of unmasked labels of each of `dataset.source_names`.
    """
    if not dataset.source_names:
        return []
    counts = np.zeros(len(dataset.source_names), np.int64)
    for indices, batch in zip(samples, batches, strict=True):
        per_sample = (batch.labels != MASKED).reshape(len(batch.labels), -1).sum(axis=1)
        np.add.at(counts, dataset.sources_of(indices), per_sample)
    return [int(count) for count in counts]


def data_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures of the data for result.json.

    Args:
        dataset: The training data.
        num_samples: Number of samples that were trained.
        tokens: Number of tokens that were trained, by source.

    Returns:
        `sources` of a mixture, `stream` of a stream, or nothing.
    """
    figures = dataset.figures(num_samples)
    for name, source in figures.get("sources", {}).items():
        source["tokens"] = tokens.get(name, 0)
    return figures


def source_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return samples, tokens and epochs of each source for metrics; the arguments are those of `data_figures`."""
    sources = data_figures(dataset, num_samples, tokens).get("sources", {})
    return {name: {key: source[key] for key in ("samples", "tokens", "epochs")} for name, source in sources.items()}
