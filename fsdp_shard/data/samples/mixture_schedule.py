"""Which source each sample of a mixture comes from: a function of the weights and the place, and of nothing else. Pure.

Weights become whole shares of a round. Within a round the k-th sample (from 0) of a source with m shares of P has its
turn among places floor(k P / m) to ceil((k + 1) P / m) - 1, the earliest deadline first, which always works out
(Baruah et al., Proportionate progress, 1996). So among the first n samples each source has its weight's part of n to
within less than one sample, for every n, and place n is known without going through those before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

LONGEST_ROUND = 1 << 14


def whole_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in the proportion of `weights`, as small as possible.

    Exact, unless they would add up to more than `LONGEST_ROUND`: then so many are shared out by largest remainders, and
    each has one at least.
    """
    if not weights:
        return {}
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    parts = {name: weight / total for name, weight in exact.items()}
    unit = 1
    for part in parts.values():
        unit = unit * part.denominator // gcd(unit, part.denominator)
    if unit <= LONGEST_ROUND:
        return {name: int(part * unit) for name, part in parts.items()}
    shares = {name: int(part * LONGEST_ROUND) for name, part in parts.items()}
    by_rest = sorted(parts, key=lambda name: shares[name] - parts[name] * LONGEST_ROUND)
    for name in by_rest[: LONGEST_ROUND - sum(shares.values())]:
        shares[name] += 1
    return {name: max(1, share) for name, share in shares.items()}


@lru_cache(maxsize=4)
def one_round(shares: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The source [sum(shares)] of each place in a round; read-only."""
    size = sum(shares)
    counts = [0] * len(shares)
    turns = np.empty(size, np.int64)
    for place in range(size):
        ready = (i for i, share in enumerate(shares) if counts[i] * size < share * (place + 1))
        chosen = min(ready, key=lambda i: -(-(counts[i] + 1) * size // shares[i]))
        counts[chosen] += 1
        turns[place] = chosen
    assert counts == list(shares)
    turns.setflags(write=False)
    return turns


def turns(shares: Sequence[int], first: int, count: int) -> npt.NDArray[np.int64]:
    """The source [count] of each of the places [first, first + count)."""
    whole = one_round(tuple(shares))
    return whole[np.arange(first, first + count) % len(whole)]


def counts_before(shares: Sequence[int], place: int) -> npt.NDArray[np.int64]:
    """How many samples of each source [num_sources] come before `place`."""
    whole = one_round(tuple(shares))
    rounds, rest = divmod(place, len(whole))
    return rounds * np.asarray(shares, np.int64) + np.bincount(whole[:rest], minlength=len(shares))


def places_until(shares: Sequence[int], source: int, count: int) -> int:
    """After how many samples of the order `count` (at least one) of them are of `source`."""
    whole = one_round(tuple(shares))
    rounds, rest = divmod(count - 1, shares[source])
    return rounds * len(whole) + int(np.flatnonzero(whole == source)[rest]) + 1
