"""Ring attention: keys and values circulate among the ranks, and each rank attends to them with its own queries.

Liu et al., Ring Attention with Blockwise Transformers (2023). In each of N-1 rounds, a rank sends the keys and values
that it holds to the next rank, while it computes with them. In the backward pass, they circulate again, and their
float32 gradients follow until they return to their own rank.
"""

from collections.abc import Iterator
from typing import Any

import torch

from fsdp_shard.sharding.context_parallel.blockwise import Accumulated, Gradients, Scoring
from fsdp_shard.sharding.context_parallel.masks import SequenceMask
from fsdp_shard.sharding.context_parallel.sequence_parts import ContextRanks


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    how: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with this rank's queries to the keys of all ranks; a collective.

    Args:
        query: [batch, heads, part, width]; the tokens are in the order of the rank's chunks.
        key: [batch, key_value_heads, part, width]; key_value_heads divides the number of heads.
        value: [batch, key_value_heads, part, value_width].
        mask: Defines which tokens attend to which, and the ranks.
        how: Scale and cap of the scores.
        sinks: For each head, a score that enters the softmax without a value [heads], if any.

    Returns:
        The attention [batch, heads, part, value_width].
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    by_group = None if sinks is None else sinks.view(grouped.shape[1:3])
    found: torch.Tensor = _Ring.apply(grouped, key, value, by_group, mask, how)  # type: ignore[no-untyped-call]  # untyped in torch
    return found.flatten(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: SequenceMask,
        how: Scoring,
    ) -> torch.Tensor:
        so_far = Accumulated.nothing(query, value.shape[-1])
        for owner, keys, values in _circulate(key, value, mask.sequence.ranks):
            for rows, columns, allowed in _pairs(mask, owner):
                block = keys[:, :, columns], values[:, :, columns]
                so_far.part(rows).add(query[:, :, :, rows], *block, allowed, how)
        normalizer = so_far.normalizer(sinks)
        output = so_far.result(normalizer, value.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, normalizer)
        ctx.mask, ctx.how = mask, how
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, normalizer = ctx.saved_tensors
        ranks = ctx.mask.sequence.ranks
        delta = (grads[0].float() * output).sum(-1)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        known = Gradients(query, grads[0], normalizer, delta, of_query)
        home = _KeyValueBuffer.zeros(key, value)
        traveling = _KeyValueBuffer.zeros(key, value) if ranks.num_ranks > 1 else home
        for owner, keys, values in _circulate(key, value, ranks):
            into = home if owner == ranks.rank else traveling
            for rows, columns, allowed in _pairs(ctx.mask, owner):
                block = keys[:, :, columns], values[:, :, columns]
                targets = into.of_key[:, :, columns], into.of_value[:, :, columns]
                known.part(rows).add(block, targets, allowed, ctx.how)
            if owner != ranks.rank:
                traveling = traveling.sent_to_next(ranks)
        if ranks.num_ranks > 1:
            home.both.add_(traveling.both)
        of_sinks = None
        if sinks is not None:
            weights = (sinks.float()[None, :, :, None] - normalizer).exp()
            of_sinks = -(weights * delta).sum((0, 3)).to(sinks.dtype)
        of_key, of_value = home.of_key.to(key.dtype), home.of_value.to(value.dtype)
        return of_query.to(query.dtype), of_key, of_value, of_sinks, None, None


class _KeyValueBuffer:
    """Two tensors in one buffer: keys and values, or their gradients."""

    def __init__(self, both: torch.Tensor, key_shape: torch.Size, value_shape: torch.Size) -> None:
        self.both, self._shapes = both, (key_shape, value_shape)
        self.of_key = both[: key_shape.numel()].view(key_shape)
        self.of_value = both[key_shape.numel() :].view(value_shape)

    @classmethod
    def zeros(cls, key: torch.Tensor, value: torch.Tensor) -> "_KeyValueBuffer":
        """Return float32 zeros of these shapes."""
        both = key.new_zeros(key.numel() + value.numel(), dtype=torch.float32)
        return cls(both, key.shape, value.shape)

    @classmethod
    def joined(cls, key: torch.Tensor, value: torch.Tensor) -> "_KeyValueBuffer":
        """Return a copy of both."""
        return cls(torch.cat([key.flatten(), value.flatten()]), key.shape, value.shape)

    def begin_send_to_next(self, ranks: ContextRanks) -> tuple["_KeyValueBuffer", list[Any]]:
        """Send this to the next rank; return the buffer received from the previous one, and the work to wait for."""
        received = _KeyValueBuffer(torch.empty_like(self.both), *self._shapes)
        return received, ranks.begin_send_to_next(received.both, self.both)

    def sent_to_next(self, ranks: ContextRanks) -> "_KeyValueBuffer":
        """Send this to the next rank and return the buffer received from the previous one; a collective."""
        received, works = self.begin_send_to_next(ranks)
        for work in works:
            work.wait()
        return received


def _circulate(
    key: torch.Tensor, value: torch.Tensor, ranks: ContextRanks
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (rank, keys, values) of each rank, this one first, while the next ones are being transferred."""
    if ranks.num_ranks == 1:
        yield 0, key, value
        return
    held = _KeyValueBuffer.joined(key, value)
    for step in range(ranks.num_ranks):
        is_last = step + 1 == ranks.num_ranks
        received, works = (held, []) if is_last else held.begin_send_to_next(ranks)
        yield (ranks.rank - step) % ranks.num_ranks, held.of_key, held.of_value
        for work in works:
            work.wait()
        held = received


def _pairs(mask: SequenceMask, owner: int) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield pairs of chunks, of this rank's queries and of `owner`'s keys, except those without any attention.

    Yields:
        The rows and columns of both chunks in the ranks' tensors, and the mask of the rectangle, None if it is full.
    """
    sequence = mask.sequence
    size, chunks = sequence.chunk_length, sequence.ranks.chunks
    for row, query_chunk in enumerate(chunks[sequence.ranks.rank]):
        for column, key_chunk in enumerate(chunks[owner]):
            if mask.is_empty(query_chunk, key_chunk):
                continue
            allowed = None
            if not mask.is_full(query_chunk, key_chunk):
                places = (slice(chunk * size, (chunk + 1) * size) for chunk in (query_chunk, key_chunk))
                allowed = mask.rectangle(*places)
            yield slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size), allowed
