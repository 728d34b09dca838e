"""Keys and values of a conversation turn, reused for the next, which usually starts with the same tokens.

Only caches that can be cropped exactly are kept: sliding windows and recurrent states lack the data for a crop.
"""

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fsdp_shard.utils import num_common


class PrefixCache:
    """The KV cache of the last turn. It is removed while a turn is computed, so an interrupted one is never used."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, ids: Sequence[int]) -> DynamicCache | None:
        """Return the cache cropped to its common prefix with `ids`, or None. At least one token is left to run."""
        cache, self._cache = self._cache, None
        common = num_common(self._tokens, ids[:-1])
        if cache is None or not common:
            return None
        if excess := len(self._tokens) - common:
            cache.crop(-excess)
        return cache

    def put(self, tokens: Sequence[int], cache: Any) -> None:
        """Keep `cache`, returned by `generate` along with `tokens`: prompt and answer, whose last token was not run."""
        if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
            self._tokens, self._cache = list(tokens[: cache.get_seq_length()]), cache
