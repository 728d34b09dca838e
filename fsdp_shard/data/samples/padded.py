"""Examples seen as samples, one a window: cut where they are too long, padded where they are short. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.sample_order import sample_indices
from fsdp_shard.data.samples.windows import MASKED, NO_WINDOW, Batch
from fsdp_shard.data.tokenized.example_cache import Examples

# Batches are padded to a multiple of this: kernels like it, and there are fewer shapes to compile for.
_WIDTH_UNIT = 8


@dataclass(frozen=True)
class Cut:
    """What cutting to a length did: `kept` [num_kept] examples, of which `num_truncated` were longer; `num_dropped`
    others have nothing left to predict.
    """

    kept: npt.NDArray[np.int64]
    num_truncated: int
    num_dropped: int


def cut_causal(examples: Examples, sequence_length: int) -> Cut:
    """Examples in which a token is predicted from those before it, within a window of `sequence_length` inputs."""
    lengths = np.minimum(examples.lengths, sequence_length + 1)
    usable = (examples.first >= 0) & (np.maximum(examples.first, 1) < lengths)
    return cut_rows(usable, examples.lengths > sequence_length + 1)


def cut_rows(usable: npt.NDArray[np.bool_], longer: npt.NDArray[np.bool_]) -> Cut:
    """What is left of examples [num_examples]: the `usable` ones, of which some are `longer` than a window."""
    kept = np.flatnonzero(usable)
    return Cut(kept, int(np.count_nonzero(longer[kept])), len(usable) - len(kept))


@dataclass(frozen=True)
class RowDataset:
    """The examples `kept` of `examples`, each cut to `sequence_length`: what all shapes of samples have in common."""

    examples: Examples
    kept: npt.NDArray[np.int64]
    sequence_length: int
    part: str = ""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}:{self.examples.name}{self.part}:{len(self)}/{self.sequence_length}"

    @property
    def num_predictions(self) -> int:
        return sum(self.batch([index]).num_predictions for index in range(len(self)))

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        return sample_indices(seed, len(self), first, count)

    def head(self, num_windows: int | None) -> Self:
        return self if num_windows is None or num_windows >= len(self) else self.slice(0, num_windows)

    def slice(self, first: int, last: int) -> Self:
        return replace(self, kept=self.kept[first:last], part=f"{self.part}+{first}")

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        raise AssertionError("each shape of samples implements this")

    def _chosen(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> list[int | None]:
        """The example behind each of `indices`; None for NO_WINDOW."""
        for index in indices:
            if index != NO_WINDOW and not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {len(self)}")
        return [None if index == NO_WINDOW else int(self.kept[index]) for index in indices]


class CausalRows(RowDataset):
    """A row a window, each token predicted from those before it where the row says so; padding comes last."""

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        rows = [next_tokens(self.examples, index, self.sequence_length) for index in self._chosen(indices)]
        input_ids = stack([inputs for inputs, _ in rows], 0, self.sequence_length)
        return Batch(input_ids, stack([labels for _, labels in rows], MASKED, self.sequence_length))


def next_tokens(
    examples: Examples, index: int | None, sequence_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(inputs, labels), both [length], of one example: the label of a token is the one after it, or MASKED."""
    if index is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    tokens, predicted = examples.tokens_of(index)
    ids = tokens[: sequence_length + 1].astype(np.int64)
    labels = np.where(predicted[1 : len(ids)] != 0, ids[1:], MASKED)
    return ids[:-1], labels


def stack(rows: Sequence[npt.NDArray[np.int64]], padding: int, longest: int) -> npt.NDArray[np.int64]:
    """`rows` [num_rows, width], padded at their ends; the width is that of the longest row, rounded up to a unit."""
    width = max(1, *(len(row) for row in rows))
    width = min(-(-width // _WIDTH_UNIT) * _WIDTH_UNIT, max(width, longest))
    stacked = np.full((len(rows), width), padding, np.int64)
    for row, values in zip(stacked, rows, strict=True):
        row[: len(values)] = values
    return stacked
