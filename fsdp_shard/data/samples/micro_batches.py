"""Which samples each rank runs, in which micro-batch: the same global batches on any number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.windows import NO_WINDOW


def micro_batches(
    samples: npt.NDArray[np.int64], micro_batch_size: int, rank: int, num_ranks: int
) -> npt.NDArray[np.int64]:
    """This rank's part [num_micro_batches, micro_batch_size] of the global batch `samples`.

    Micro-batch m of rank r holds places (m * num_ranks + r) * micro_batch_size and following.
    """
    if len(samples) % (micro_batch_size * num_ranks):
        raise ValueError(f"{len(samples)} samples in micro-batches of {micro_batch_size} on {num_ranks} ranks")
    return samples.reshape(-1, num_ranks, micro_batch_size)[:, rank]


def evaluation_batches(
    num_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[npt.NDArray[np.int64]]:
    """This rank's part of all samples once, in order, as arrays [micro_batch_size].

    Every rank gets the same number of them, since each forward pass is a collective; what is left over is `NO_WINDOW`.
    """
    unit = micro_batch_size * num_ranks
    padded = np.full(-(-num_samples // unit) * unit, NO_WINDOW, np.int64)
    padded[:num_samples] = np.arange(num_samples)
    yield from micro_batches(padded, micro_batch_size, rank, num_ranks)
