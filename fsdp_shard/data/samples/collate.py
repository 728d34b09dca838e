"""Batches put together from parts that were made apart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.windows import MASKED, Batch

Rows = npt.NDArray[np.int64]


def merge(pieces: Sequence[tuple[Rows, Batch]]) -> Batch:
    """One batch of `pieces`: each is a batch and the rows that its samples have in the whole.

    Narrower ones are padded at the end, where nothing is predicted and no mask looks, as their own rows are: some
    models look for the last token that is not padding.
    """
    if len(pieces) == 1 and np.array_equal(pieces[0][0], np.arange(len(pieces[0][0]))):
        return pieces[0][1]
    names = set(pieces[0][1].others)
    assert all(set(batch.others) == names for _, batch in pieces), "samples of one model have the same inputs"
    padding = pieces[0][1].padding
    return Batch(
        _stack([(rows, batch.input_ids) for rows, batch in pieces], padding),
        _stack([(rows, batch.labels) for rows, batch in pieces], MASKED),
        {name: _stack([(rows, batch.others[name]) for rows, batch in pieces], 0) for name in sorted(names)},
        padding,
    )


def _stack(pieces: Sequence[tuple[Rows, Rows]], padding: int) -> Rows:
    num_rows = sum(len(rows) for rows, _ in pieces)
    width = max((array.shape[1:] for _, array in pieces), default=())
    stacked = np.full((num_rows, *width), padding, np.int64)
    for rows, array in pieces:
        if array.ndim == 1:
            stacked[rows] = array
        else:
            stacked[rows, : array.shape[1]] = array
    return stacked
