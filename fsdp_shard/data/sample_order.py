"""Permutations of samples, rows and files that depend only on seeds.

They are the stable argsort of raw Philox output (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
numpy guarantees the streams of its bit generators (NEP 19), but not those of `Generator.permutation`: an upgrade during
a run must not change its order.
"""

import numpy as np
import numpy.typing as npt


def permutation(size: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Return a read-only permutation [size], different for each combination of `seeds`."""
    keys = np.random.Philox(np.random.SeedSequence(seeds)).random_raw(size)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
