"""Keys and values of one turn of a conversation, reused for the next, which usually begins with the same tokens.

Only a cache that can be cropped exactly is kept: sliding windows and recurrent states no longer hold what a crop needs.
"""

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fsdp_shard.utils import num_common


class PrefixCache:
    """The KV cache of the last turn. It is taken out while a turn is computed, so an interrupted one is never used."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, ids: Sequence[int]) -> DynamicCache | None:
        """The cache cropped to its common prefix with `ids`, or None. At least one token is left to run."""
        cache, self._cache = self._cache, None
        common = num_common(self._tokens, ids[:-1])
        if cache is None or not common:
            return None
        if excess := len(self._tokens) - common:
            cache.crop(-excess)
        return cache

    def put(self, tokens: Sequence[int], cache: Any) -> None:
        """Keep `cache`, which `generate` returned with `tokens`: prompt and answer, whose last token was not run."""
        if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
            self._tokens, self._cache = list(tokens[: cache.get_seq_length()]), cache
