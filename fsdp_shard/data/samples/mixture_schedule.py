"""Selects the source of each sample of a mixture, as a function of the weights and the position of the sample.

Weights become integer counts per round. Within a round of P samples, the k-th sample (from 0) of a source with count m
is scheduled among positions floor(k P / m) to ceil((k + 1) P / m) - 1, earliest deadline first, which is always
possible (Baruah et al., Proportionate progress, 1996). Among the first n samples, for every n, each source therefore
has its share of n to within less than one sample, and the source of sample n follows without a loop over earlier
samples.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from fsdp_shard.data.samples.batch import Ints

LONGEST_ROUND = 1 << 14


def counts_per_round(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest integers in the proportion of `weights`.

    They are exact unless their sum would exceed `LONGEST_ROUND`. In that case, `LONGEST_ROUND` samples are distributed
    by largest remainders, with at least one for each source.
    """
    if not weights:
        return {}
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    parts = {name: weight / total for name, weight in exact.items()}
    size = lcm(*(part.denominator for part in parts.values()))
    if size <= LONGEST_ROUND:
        return {name: int(part * size) for name, part in parts.items()}
    counts = {name: int(part * LONGEST_ROUND) for name, part in parts.items()}
    by_remainder = sorted(parts, key=lambda name: counts[name] - parts[name] * LONGEST_ROUND)
    for name in by_remainder[: LONGEST_ROUND - sum(counts.values())]:
        counts[name] += 1
    return {name: max(1, count) for name, count in counts.items()}


def one_round(counts: Sequence[int]) -> Ints:
    """Return the source of each sample of a round [sum(counts)]."""
    size = sum(counts)
    scheduled = [0] * len(counts)
    sources = np.empty(size, np.int64)
    for position in range(size):
        ready = (i for i, count in enumerate(counts) if scheduled[i] * size < count * (position + 1))
        chosen = min(ready, key=lambda i: -(-(scheduled[i] + 1) * size // counts[i]))
        scheduled[chosen] += 1
        sources[position] = chosen
    assert scheduled == list(counts)
    return sources
