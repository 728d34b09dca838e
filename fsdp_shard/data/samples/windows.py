"""A stream of tokens seen as windows of one length, each with the token that follows every one of its tokens.

Window i predicts tokens i*L+1 ... i*L+L from those before them: no token is predicted twice and none is left out. The
last window may be short; it is padded, and padding is masked. Knows neither files' formats nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.sample_order import sample_indices

MASKED = -100  # the label that torch's and transformers' losses leave out
NO_WINDOW = -1  # the index of a window of which everything is masked


@dataclass(frozen=True)
class Batch:
    """Samples stacked, int64: `input_ids` [num_samples, length], and `labels` with the shape of the model's logits but
    for their last dimension; those of a next token are already shifted.

    `others` are further inputs of the model, by the names of its arguments. Shorter `input_ids` end in `padding`.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    others: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    padding: int = 0

    @property
    def inputs(self) -> dict[str, npt.NDArray[np.int64]]:
        """Everything that the model is given, by the names of its arguments."""
        return {"input_ids": self.input_ids, **self.others}

    @property
    def num_predictions(self) -> int:
        """Labels that count."""
        return int(np.count_nonzero(self.labels != MASKED))


@dataclass(frozen=True)
class WindowDataset:
    """`tokens` [num_tokens] in windows of `sequence_length`; `name` tells this stream of tokens from any other."""

    tokens: npt.NDArray[Any]
    sequence_length: int
    name: str

    def __len__(self) -> int:
        return -(-self.num_predictions // self.sequence_length)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_predictions(self) -> int:
        """Tokens that are predicted: all but the first."""
        return max(0, len(self.tokens) - 1)

    @property
    def num_padded(self) -> int:
        """Masked places in the last window."""
        return len(self) * self.sequence_length - self.num_predictions

    @property
    def identity(self) -> str:
        """Equal for two data sets exactly when every window of them is equal; kept in a checkpoint."""
        return f"{self.name}:{self.num_tokens}/{self.sequence_length}"

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """The windows [count] at places [first, first + count) of the endless order of training."""
        return sample_indices(seed, len(self), first, count)

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The windows of `indices`, stacked; `NO_WINDOW` gives one that is all padding."""
        shape = (len(indices), self.sequence_length)
        batch = Batch(np.zeros(shape, np.int64), np.full(shape, MASKED, np.int64))
        for row, index in enumerate(indices):
            if index != NO_WINDOW:
                self._fill(batch, row, int(index))
        return batch

    def head(self, num_windows: int | None) -> WindowDataset:
        """The first `num_windows` windows only; all of them when None."""
        if num_windows is None or num_windows >= len(self):
            return self
        return self.slice(0, num_windows)

    def slice(self, first: int, last: int) -> WindowDataset:
        """Windows [first, last). Neighboring slices share one token, which is predicted in the earlier one only."""
        start, stop = first * self.sequence_length, last * self.sequence_length + 1
        return WindowDataset(self.tokens[start:stop], self.sequence_length, f"{self.name}+{start}")

    def _fill(self, batch: Batch, row: int, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        piece = self.tokens[start : start + self.sequence_length + 1]
        batch.input_ids[row, : len(piece) - 1] = piece[:-1]
        batch.labels[row, : len(piece) - 1] = piece[1:]
