"""The order in which samples are trained: a function of the seed alone.

It is the same for any number of ranks, micro-batch size and restart, so a run resumes from the number of samples that
it has consumed. Each epoch is a permutation of all samples.

The permutation is the stable argsort of raw Philox output (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
2011), seeded by (seed, epoch). numpy guarantees the streams of its bit generators (NEP 19), but not those of
`Generator.permutation`: an upgrade during a run must not change its order.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt


def sample_indices(seed: int, num_samples: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """Return a part of the endless order of samples.

    Args:
        seed: The seed of the order.
        num_samples: Number of samples in an epoch.
        first: Position of the first sample in the order.
        count: How many samples to return.

    Returns:
        The indices [count] of the samples, int64.

    Raises:
        ValueError: There are no samples.
    """
    if num_samples < 1:
        raise ValueError("there are no samples to order")
    pieces = [np.empty(0, np.int64)]
    while count > 0:
        epoch, start = divmod(first, num_samples)
        pieces.append(epoch_order(seed, num_samples, epoch)[start : start + count])
        first, count = first + len(pieces[-1]), count - len(pieces[-1])
    return np.concatenate(pieces)


def epoch_order(seed: int, num_samples: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the permutation [num_samples] of one epoch; it is cached, so it is read-only."""
    return _orders(seed, num_samples)(epoch)


@lru_cache(maxsize=64)  # one for each source of a mixture
def _orders(seed: int, num_samples: int) -> Callable[[int], npt.NDArray[np.int64]]:
    return lru_cache(maxsize=2)(lambda epoch: permutation(num_samples, seed, epoch))


def permutation(size: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Return a permutation [size], read-only; each combination of `seeds` has another one."""
    keys = np.random.Philox(np.random.SeedSequence(seeds)).random_raw(size)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
