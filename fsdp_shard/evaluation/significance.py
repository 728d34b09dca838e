"""Intervals and p-values over documents: how much figures would vary on other documents of the same kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
_NUMBERS_AT_ONCE = 1 << 22  # maximum documents times resamples in memory


def bootstrap_interval(losses: Floats, sizes: Floats, num_resamples: int, seed: int) -> tuple[float, float] | None:
    """Return the 95 % interval of sum(losses) / sum(sizes) by the percentile bootstrap over documents.

    Each resample draws as many documents as there are, with replacement. The interval lies between the 2.5th and the
    97.5th percentile of the resamples' figures. A document counts by its size, as in the figure itself.

    Args:
        losses: Sums per document [num_documents]: of losses, or of loss differences between two models.
        sizes: Tokens or bytes of each document [num_documents].
        num_resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        The interval; None for fewer than two documents.
    """
    num_documents = len(losses)
    if num_documents < 2:
        return None
    draws, found = np.random.default_rng(seed), list[Floats]()
    for count in _parts(num_resamples, num_documents):
        chosen = draws.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=count)
        found.append((chosen @ losses) / (chosen @ sizes))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(found), [tail, 1 - tail])
    return float(low), float(high)


def sign_flip_p_value(differences: Floats, num_resamples: int, seed: int) -> float | None:
    """Return the p-value of a paired, two-sided permutation test by sign flips.

    If two models were equally good, each document's losses could as well be swapped. So the sign of each document's
    difference is flipped at random. The p-value is the proportion of resulting sums that are at least as far from 0 as
    the observed sum, which itself counts as one of them: (1 + hits) / (1 + num_resamples).

    Args:
        differences: Differences of the summed losses per document [num_documents].
        num_resamples: Number of permutations.
        seed: Seed of the flips.

    Returns:
        The p-value; None for fewer than two documents.
    """
    if len(differences) < 2:
        return None
    draws, hits = np.random.default_rng(seed), 0
    found = abs(float(differences.sum())) * (1 - 1e-12)  # tolerance: the same sum in another order counts as equal
    for count in _parts(num_resamples, len(differences)):
        signs = 2.0 * draws.integers(0, 2, (count, len(differences)), dtype=np.int8) - 1.0
        hits += int(np.count_nonzero(np.abs(signs @ differences) >= found))
    return (1 + hits) / (1 + num_resamples)


def _parts(num_resamples: int, num_documents: int) -> Iterator[int]:
    """Yield the number of resamples to draw together."""
    at_once = max(1, _NUMBERS_AT_ONCE // num_documents)
    for first in range(0, num_resamples, at_once):
        yield min(at_once, num_resamples - first)


@dataclass(frozen=True)
class Difference:
    """The loss of one model minus that of another, in nats per token, on the same tokens.

    Attributes:
        loss: The difference; negative if the first model is better.
        interval: Its 95 % interval by the paired bootstrap: both losses of a document are drawn together.
        p_value: The p-value by sign flips; see `sign_flip_p_value`.
    """

    loss: float
    interval: tuple[float, float] | None
    p_value: float | None

    @property
    def row(self) -> dict[str, Any]:
        """The difference, for result.json."""
        interval = None if self.interval is None else list(self.interval)
        method = "paired bootstrap over documents; p-value by sign flips" if self.interval else None
        return {"loss": self.loss, "interval": interval, "p_value": self.p_value, "method": method}

    def sentence(self, other: str, first_loss: float, other_loss: float) -> str:
        """Describe the difference in one sentence; `other` is the name of the second model."""
        compared = (
            f"{abs(self.loss):.4f} {'lower' if self.loss < 0 else 'higher'} than that of {other}, {other_loss:.4f}"
        )
        if self.interval is None:
            return f"loss {first_loss:.4f} is {compared} (no test: it needs two documents, by perplexity.by=documents)"
        low, high = self.interval
        return f"loss {first_loss:.4f} is {compared} (difference {low:+.4f} to {high:+.4f}, p = {self.p_value:.2g})"

    @classmethod
    def between(cls, first: Floats, other: Floats, num_tokens: Floats, num_resamples: int, seed: int) -> "Difference":
        """Compare the summed losses of two models on the same documents, all [num_documents]."""
        differences = first - other
        return cls(
            float(differences.sum() / num_tokens.sum()),
            bootstrap_interval(differences, num_tokens, num_resamples, seed),
            sign_flip_p_value(differences, num_resamples, seed),
        )
