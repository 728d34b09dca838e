"""Keys and values of a conversation turn, reused for the next, which usually starts with the same tokens.

Only caches that can be cropped exactly are kept: sliding windows and recurrent states lack the data for a crop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fsdp_shard.utils import num_common


class PrefixCache:
    """The KV cache of the last turn. It is removed while a turn is computed, so an interrupted one is never used."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache: dict[str, DynamicCache] = {}

    def take(self, ids: Sequence[int]) -> dict[str, DynamicCache]:
        """Return the cache, as an argument of `generate`, cropped to its common prefix with `ids`; empty without one.

        At least one token is left to run.
        """
        found, self._cache = self._cache, {}
        common = num_common(self._tokens, ids[:-1])
        if not common:
            return {}
        if excess := len(self._tokens) - common:
            for cache in found.values():
                cache.crop(-excess)
        return found

    def put(self, tokens: Sequence[int], found: Mapping[str, Any]) -> None:
        """Keep the cache that `generate` returned along with `tokens`.

        Args:
            tokens: Prompt and answer, whose last token was not run.
            found: The cache by the name of its argument; empty without one.
        """
        for cache in found.values():
            if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
                self._tokens, self._cache = list(tokens[: cache.get_seq_length()]), dict(found)
