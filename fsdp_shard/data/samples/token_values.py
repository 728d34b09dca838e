"""Samples with further values for each predicted token, and which samples a run uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import NO_WINDOW, Ints, Sample, Values
from fsdp_shard.data.samples.protocol import Dataset, MapDataset, SourceDataset
from fsdp_shard.errors import ConfigError


def with_token_values(
    dataset: SourceDataset, values: Mapping[str, Values], starts: Ints, known: npt.NDArray[np.bool_] | None = None
) -> SourceDataset:
    """Return the same samples with values of each trained label, such as a teacher's.

    Args:
        dataset: The samples, which are the same in all epochs.
        values: By name, those of one sample after the other, [num_predictions, ...]; may be mapped from a file.
        starts: Where those of each sample begin, and where those of the last one end [num_samples + 1].
        known: Which samples have values [num_samples]; None for all of them. Other samples are a ConfigError.

    Returns:
        The dataset, with the same identity: the values follow from it and from what computed them.

    Raises:
        ValueError: `starts` is of other samples.
    """
    if len(starts) != len(dataset) + 1:
        raise ValueError(f"values of {len(starts) - 1} samples for {len(dataset)}")
    known = np.ones(len(dataset), bool) if known is None else known
    return _WithTokenValues(dataset.sequence_length, dataset, values, starts, known)


@dataclass(frozen=True)
class _WrappedDataset(SourceDataset):
    """The base of datasets with the samples of another one."""

    sequence_length: int
    dataset: SourceDataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def identity(self) -> str:
        return self.dataset.identity

    @property
    def summary(self) -> str:
        return self.dataset.summary

    def slice(self, first: int, last: int) -> Self:
        return replace(self, dataset=self.dataset.slice(first, last))

    def _sample(self, index: int | None, epoch: int) -> Sample:
        return self.dataset.sample(NO_WINDOW if index is None else index, epoch)


@dataclass(frozen=True)
class _WithTokenValues(_WrappedDataset):
    values: Mapping[str, Values]
    starts: Ints
    known: npt.NDArray[np.bool_]

    @property
    def num_predictions(self) -> int:
        return int(self.starts[-1] - self.starts[0])

    def slice(self, first: int, last: int) -> Self:
        part = super().slice(first, last)
        return replace(part, starts=self.starts[first : last + 1], known=self.known[first:last])

    def _sample(self, index: int | None, epoch: int) -> Sample:
        if index is not None and not self.known[index]:
            raise ConfigError(
                f"Sample {index} has no {' and '.join(sorted(self.values))}: fs.add_reference adds them to the samples "
                f"of the run in the order that data.train has by then; give data.train its own order before that call."
            )
        own = slice(0, 0) if index is None else slice(int(self.starts[index]), int(self.starts[index + 1]))
        values = {name: np.asarray(array[own]) for name, array in self.values.items()}
        return replace(super()._sample(index, epoch), token_values=values)


def used_samples(
    train: Dataset, positions: Iterable[int], held_out: MapDataset | None, num_held_out: int | None
) -> list[npt.NDArray[np.bool_]]:
    """Return which samples of each source a run uses, in the order of the sources: those to train on come first.

    Args:
        train: The training data.
        positions: The positions in its order that are trained.
        held_out: The held-out data.
        num_held_out: How many of them are evaluated, None for all of them.
    """
    recorders = [_Recorder.of(source) for source in train.sources]
    order, left = train.with_sources(recorders), len(recorders)
    for position in positions:
        order.sample(position)
        if position % 1024 == 0:  # all of them, after an epoch
            left = sum(not recorder.used.all() for recorder in recorders)
        if not left:
            break
    if held_out is not None:
        evaluated = [_Recorder.of(source) for source in held_out.sources]
        chosen = held_out.with_sources(list(evaluated)).head(num_held_out)
        for index in range(len(chosen)):
            chosen.sample(index)
        recorders += evaluated
    return [recorder.used for recorder in recorders]


@dataclass(frozen=True)
class _Recorder(_WrappedDataset):
    """Notes which samples are asked for."""

    used: npt.NDArray[Any]

    @classmethod
    def of(cls, source: SourceDataset) -> Self:
        return cls(source.sequence_length, source, np.zeros(len(source), bool))

    def slice(self, first: int, last: int) -> Self:
        return replace(super().slice(first, last), used=self.used[first:last])  # a view

    def _sample(self, index: int | None, epoch: int) -> Sample:
        if index is not None:
            self.used[index] = True
        return Sample({}, np.empty(0, np.int64))
