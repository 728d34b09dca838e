"""Batches of samples: their arrays, how they are merged, and which samples each rank runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Indices: TypeAlias = Sequence[int] | Ints

MASKED = -100  # the label that the losses of torch and transformers ignore
NO_WINDOW = -1  # the index of a sample in which every label is masked


@dataclass(frozen=True)
class Batch:
    """Stacked samples.

    Attributes:
        input_ids: Token ids [num_samples, length], int64. Shorter samples end in `padding`.
        labels: Labels, int64, with the shape of the model's logits without their last dimension. Those of a next token
            are already shifted.
        others: Further inputs of the model, by the names of its arguments.
        padding: The padding token.
    """

    input_ids: Ints
    labels: Ints
    others: Mapping[str, Ints] = field(default_factory=dict)
    padding: int = 0

    @property
    def inputs(self) -> dict[str, Ints]:
        """All inputs of the model, by the names of its arguments."""
        return {"input_ids": self.input_ids, **self.others}

    @property
    def num_predictions(self) -> int:
        """Number of labels that are not masked."""
        return int(np.count_nonzero(self.labels != MASKED))


def empty_batch(num_samples: int, sequence_length: int, *others: str) -> Batch:
    """Return a batch of zeros in which every label is masked, with `others` as further inputs."""
    shape = (num_samples, sequence_length)
    inputs = {name: np.zeros(shape, np.int64) for name in others}
    return Batch(np.zeros(shape, np.int64), np.full(shape, MASKED, np.int64), inputs)


def merge(pieces: Sequence[tuple[Ints, Batch]]) -> Batch:
    """Merge batches into one.

    Narrower batches are padded at the end, as their own samples are: some models look for the last token that is not
    padding.

    Args:
        pieces: Batches, each with the rows of its samples in the result.
    """
    if len(pieces) == 1 and np.array_equal(pieces[0][0], np.arange(len(pieces[0][0]))):
        return pieces[0][1]
    names, padding = set(pieces[0][1].others), pieces[0][1].padding
    assert all(set(batch.others) == names for _, batch in pieces), "samples of one model have the same inputs"
    return Batch(
        _stack([(rows, batch.input_ids) for rows, batch in pieces], padding),
        _stack([(rows, batch.labels) for rows, batch in pieces], MASKED),
        {name: _stack([(rows, batch.others[name]) for rows, batch in pieces], 0) for name in sorted(names)},
        padding,
    )


def _stack(pieces: Sequence[tuple[Ints, Ints]], padding: int) -> Ints:
    num_rows = sum(len(rows) for rows, _ in pieces)
    width = max((array.shape[1:] for _, array in pieces), default=())
    stacked = np.full((num_rows, *width), padding, np.int64)
    for rows, array in pieces:
        if array.ndim == 1:
            stacked[rows] = array
        else:
            stacked[rows, : array.shape[1]] = array
    return stacked


def micro_batches(samples: Ints, micro_batch_size: int, rank: int, num_ranks: int) -> Ints:
    """Split a global batch into micro-batches: the same global batch on any number of ranks.

    Micro-batch m of rank r has the samples at (m * num_ranks + r) * micro_batch_size and following.

    Args:
        samples: Indices [global_batch_size] of the samples of the global batch.
        micro_batch_size: Samples per micro-batch.
        rank: The rank, among those with different data.
        num_ranks: The number of such ranks.

    Returns:
        The indices [num_micro_batches, micro_batch_size] of the samples of this rank.

    Raises:
        ValueError: The samples cannot be divided evenly.
    """
    if len(samples) % (micro_batch_size * num_ranks):
        raise ValueError(f"{len(samples)} samples in micro-batches of {micro_batch_size} on {num_ranks} ranks")
    return samples.reshape(-1, num_ranks, micro_batch_size)[:, rank]


def evaluation_batches(num_samples: int, micro_batch_size: int, rank: int, num_ranks: int) -> Iterator[Ints]:
    """Yield the indices [micro_batch_size] of each batch of this rank, for one pass over all samples in order.

    Every rank gets the same number of batches, as each forward pass is a collective; the last are filled up with
    `NO_WINDOW`. The arguments are those of `micro_batches`.
    """
    unit = micro_batch_size * num_ranks
    padded = np.full(-(-num_samples // unit) * unit, NO_WINDOW, np.int64)
    padded[:num_samples] = np.arange(num_samples)
    yield from micro_batches(padded, micro_batch_size, rank, num_ranks)
