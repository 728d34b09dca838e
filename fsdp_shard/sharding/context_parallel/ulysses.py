"""Ulysses: ranks exchange parts of the sequence for parts of the heads, and attend to the whole sequence.

Jacobs et al., DeepSpeed Ulysses (2023). Each rank sends the fraction (N-1)/N of its queries, keys, values and outputs
in the forward pass, and of their gradients in the backward pass.
"""

from math import gcd
from typing import Any

import torch

from fsdp_shard.sharding.context_parallel.sequence_parts import ContextRanks


def num_sent_heads(num_key_value_heads: int, num_ranks: int) -> int:
    """Number of key heads to send, repeated as few times as possible to divide evenly over the ranks."""
    return num_key_value_heads * num_ranks // gcd(num_key_value_heads, num_ranks)


def to_heads(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """Exchange this rank's [batch, heads, part, width] for [batch, heads / num_ranks, length, width]; a collective."""
    exchanged: torch.Tensor = _ToHeads.apply(tensor, ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return exchanged


def to_sequence(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """The inverse of `to_heads`; a collective."""
    exchanged: torch.Tensor = _ToSequence.apply(tensor, ranks)  # type: ignore[no-untyped-call]  # torch leaves it so
    return exchanged


def repeat_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat each head of [batch, heads, length, width] in place, until there are `num_heads`."""
    return tensor if tensor.shape[1] == num_heads else tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return _heads_of_all(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sequence_of_one(grads[0], ctx.ranks), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return _sequence_of_one(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _heads_of_all(grads[0], ctx.ranks), None


def _heads_of_all(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    batch, heads, part, width = tensor.shape
    by_rank = tensor.reshape(batch, ranks.num_ranks, heads // ranks.num_ranks, part, width)
    received = _exchange(by_rank.movedim(1, 0), ranks)  # [num_ranks, batch, heads / num_ranks, part, width]
    return received.movedim(0, 2).reshape(batch, heads // ranks.num_ranks, ranks.num_ranks * part, width)


def _sequence_of_one(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    batch, heads, length, width = tensor.shape
    by_rank = tensor.reshape(batch, heads, ranks.num_ranks, length // ranks.num_ranks, width)
    received = _exchange(by_rank.movedim(2, 0), ranks)  # [num_ranks, batch, heads, part, width]
    return received.movedim(0, 1).reshape(batch, ranks.num_ranks * heads, length // ranks.num_ranks, width)


def _exchange(by_rank: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """Send the i-th of [num_ranks, ...] to rank i, and return the parts from all ranks in order; a collective."""
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    ranks.exchange(received, sent)
    return received
