"""Keys and values that one turn of a conversation leaves for the next, which mostly begins with the same tokens.

Only what can be cut back without a trace is kept: sliding windows and recurrent states have forgotten what a cut would
need. Knows tokens and transformers' caches, no model and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class Turns:
    """The cache of the last turn. While one is computed it is away, so what an interruption leaves is never used."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, ids: Sequence[int]) -> DynamicCache | None:
        """The cache of what `ids` begin with, cut to that, or None. At least one token is left to run."""
        cache, self._cache = self._cache, None
        common = _num_common(self._tokens, ids[:-1])
        if cache is None or not common:
            return None
        cache.crop(common - len(self._tokens))
        return cache

    def keep(self, tokens: Sequence[int], cache: Any) -> None:
        """Hold `cache`, which `generate` gave with `tokens`: prompt and answer, of which the last was not run."""
        if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
            self._tokens, self._cache = list(tokens[: cache.get_seq_length()]), cache


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    differ = (place for place, (one, two) in enumerate(zip(first, second, strict=False)) if one != two)
    return next(differ, min(len(first), len(second)))
