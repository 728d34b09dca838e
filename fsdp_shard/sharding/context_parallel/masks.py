"""Attention masks for any rectangle of a sequence that is divided over ranks.

transformers' mask functions take indices of a batch, a head, a query and a key, as tensors that broadcast. A model
would call them for the tokens that it sees; here, they are called with token positions in the whole sequence.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fsdp_shard.sharding.context_parallel.sequence_parts import WholeSequence

MaskFunction: TypeAlias = Callable[..., Any]


class SequenceMask:
    """The object that a model passes to its layers instead of a mask tensor.

    A plain object, like transformers' own masks for flex attention, so no wrapper copies or casts it.

    Args:
        sequence: The sequences of the micro-batch.
        function: Whether a query may attend to a key, as transformers defines it.
        window: Queries do not attend to keys that are this far or further before them; None for no limit.
    """

    def __init__(self, sequence: WholeSequence, function: MaskFunction, window: int | None) -> None:
        self.sequence, self._function = sequence, function
        self._window = None if window is None or window >= sequence.length else window
        self._whole: torch.Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether each token attends to all earlier tokens and to itself."""
        return self._window is None and self.sequence.documents is None

    def on_one_rank(self) -> "SequenceMask":
        """The same mask if this rank has the whole sequence, for a part of the heads."""
        return SequenceMask(self.sequence.on_one_rank(), self._function, self._window)

    def whole(self) -> torch.Tensor | None:
        """Which tokens attend to which, bool [batch_size or 1, 1, length, length]; None if causal."""
        if self._whole is None and not self.is_causal:
            everything = slice(0, self.sequence.length)
            self._whole = self.rectangle(everything, everything)
        return self._whole

    def rectangle(self, queries: slice, keys: slice) -> torch.Tensor:
        """Which queries attend to which keys, both by place, bool [batch_size or 1, 1, num_queries, num_keys]."""
        positions, documents = self.sequence.positions, self.sequence.documents
        batch = torch.arange(len(positions), device=positions.device)[:, None, None, None]
        head = batch.new_zeros(1, 1, 1, 1)
        if documents is None:  # positions are indices in the sequence
            positions = positions[:1]
        of_queries, of_keys = positions[:, None, queries, None], positions[:, None, None, keys]
        allowed: torch.Tensor = self._function(batch, head, of_queries, of_keys)
        if documents is not None:
            allowed = allowed & (documents[:, None, queries, None] == documents[:, None, None, keys])
        return allowed

    def is_empty(self, query_chunk: int, key_chunk: int) -> bool:
        """Whether no token of one chunk attends to any of the other, as far as this is known; otherwise false."""
        if key_chunk > query_chunk:
            return True
        between = (query_chunk - key_chunk - 1) * self.sequence.chunk_length + 1  # the smallest distance
        if self._window is not None and between >= self._window:
            return True
        edges = self.sequence.edges
        return edges is not None and bool((edges[:, key_chunk, 1] < edges[:, query_chunk, 0]).all())

    def is_full(self, query_chunk: int, key_chunk: int) -> bool:
        """Whether all tokens of one chunk are known to attend to all tokens of the other."""
        edges = self.sequence.edges
        within = edges is None or bool((edges[:, key_chunk, 0] == edges[:, query_chunk, 1]).all())
        return key_chunk < query_chunk and self._window is None and within
