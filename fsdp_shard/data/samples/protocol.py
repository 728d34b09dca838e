"""What training asks of samples, however they come about. Knows no torch and no rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.windows import Batch


class Dataset(Protocol):
    """Samples by number, and the one order in which they are trained."""

    @property
    def identity(self) -> str:
        """Equal for two data sets exactly when every sample of them is equal; kept in a checkpoint."""

    @property
    def sequence_length(self) -> int:
        """The most tokens in a sample."""

    def __len__(self) -> int: ...

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """The samples [count] at places [first, first + count) of the endless order; a function of its arguments."""

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The samples of `indices`, stacked; `NO_WINDOW` gives one in which nothing counts."""


class HeldOut(Dataset, Protocol):
    """A data set that can be divided."""

    @property
    def num_predictions(self) -> int:
        """Labels that count in all samples."""

    def head(self, num_windows: int | None) -> HeldOut:
        """The first `num_windows` samples only; all of them when None."""

    def slice(self, first: int, last: int) -> HeldOut:
        """Samples [first, last)."""
