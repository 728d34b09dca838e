"""Attention over one block of keys at a time, with an online softmax, and its gradients.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018), and Dao, FlashAttention-2 (2023), in plain
operators of torch: sums are float32, scores are in memory for only a few rows at a time, and the backward pass
recomputes them.

Queries are [batch, groups, heads, length, width]. The heads of a group share one head of keys and values, which are
[batch, groups, length, width] and never repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_LEAST_TILE_BYTES = 1 << 20  # of scores computed at a time: with fewer, launch overhead dominates
_NOTHING = -1e30  # the highest score before the first key; finite, so infinities are never subtracted


@dataclass(frozen=True)
class Scoring:
    """Conversion of products to scores: their scale, and a cap softcap * tanh(score / softcap), if any."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Accumulated:
    """The attention of queries to the keys processed so far.

    Attributes:
        output: Sum of the values, weighted by exp(score - highest), float32 [batch, groups, heads, length, width].
        highest: The highest score, float32 [batch, groups, heads, length].
        total: Sum of the weights, shaped like `highest`, float32.
    """

    output: torch.Tensor
    highest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def nothing(cls, query: torch.Tensor, width: int) -> "Accumulated":
        """Return the state before the first key, for values of this width."""
        rows = query.shape[:-1]
        highest = query.new_full(rows, _NOTHING, dtype=torch.float32)
        return cls(query.new_zeros((*rows, width), dtype=torch.float32), highest, torch.zeros_like(highest))

    def part(self, rows: slice) -> "Accumulated":
        """The same memory for some of the queries."""
        return Accumulated(self.output[:, :, :, rows], self.highest[:, :, :, rows], self.total[:, :, :, rows])

    def normalizer(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """The logarithm of the sum of exp(score), shaped like `highest`; `sinks` [groups, heads] are scores, too."""
        found = self.highest + self.total.log()
        return found if sinks is None else torch.logaddexp(found, sinks.float()[None, :, :, None])

    def result(self, normalizer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The attention [batch, groups, heads, length, width]."""
        return self.output.mul_((self.highest - normalizer).exp()[..., None]).to(dtype)

    def add(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, how: Scoring
    ) -> None:
        """Attend to a block of keys; `mask` [batch or 1, 1, num_queries, num_keys] is true where that is allowed."""
        for rows in _tiles(query, key):
            part = self.part(rows)
            scores = _scores(query[:, :, :, rows], key, _rows(mask, rows), how)
            highest = torch.maximum(part.highest, scores.amax(-1))
            weights = scores.sub_(highest[..., None]).exp_()
            correction = (part.highest - highest).exp_()
            part.highest.copy_(highest)
            part.total.mul_(correction).add_(weights.sum(-1))
            part.output.mul_(correction[..., None]).add_(_grouped_matmul(weights.to(value.dtype), value))


@dataclass(frozen=True)
class Gradients:
    """The data of queries that the backward pass needs, and their accumulated gradient.

    Attributes:
        query: The queries of the forward pass.
        output: The gradient of the output, shaped like `query`.
        normalizer: The normalizer of the forward pass.
        delta: The sum of gradient * output over the width, float32, shaped like `normalizer`.
        of_query: The gradient of the queries, float32.
    """

    query: torch.Tensor
    output: torch.Tensor
    normalizer: torch.Tensor
    delta: torch.Tensor
    of_query: torch.Tensor

    def part(self, rows: slice) -> "Gradients":
        """The same memory for some of the queries."""
        return Gradients(*(tensor[:, :, :, rows] for tensor in vars(self).values()))

    def add(
        self,
        block: tuple[torch.Tensor, torch.Tensor],
        into: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        how: Scoring,
    ) -> None:
        """Add the gradients through a block of keys and values, whose own gradients are added to the float32 `into`."""
        (key, value), (of_key, of_value) = block, into
        for rows in _tiles(self.query, key):
            part = self.part(rows)
            scores = _scores(part.query, key, _rows(mask, rows), how)
            cap_derivative = None if how.softcap is None else 1 - (scores / how.softcap).clamp(min=-1).square()
            weights = scores.sub_(part.normalizer[..., None]).exp_()
            of_value += _matmul_sum_over_heads(weights.to(value.dtype), part.output)
            grad_scores = (
                _grouped_matmul(part.output, value.transpose(-1, -2)).sub_(part.delta[..., None]).mul_(weights)
            )
            if cap_derivative is not None:
                grad_scores.mul_(cap_derivative)
            grad_scores = grad_scores.mul_(how.scale).to(key.dtype)
            part.of_query.add_(_grouped_matmul(grad_scores, key))
            of_key += _matmul_sum_over_heads(grad_scores, part.query)


def _tiles(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Yield parts of the queries whose float32 scores need as many bytes as float32 queries, or a megabyte."""
    length = query.shape[3]
    size = max(1, max(_LEAST_TILE_BYTES, 4 * query.numel()) // (4 * query[..., :1, 0].numel() * key.shape[2]))
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _rows(mask: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if mask is None else mask[:, :, rows, None].transpose(2, 3)  # [batch or 1, 1, 1, rows, num_keys]


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, how: Scoring) -> torch.Tensor:
    """The scores, float32 [batch, groups, heads, num_queries, num_keys], minus infinity where `mask` is false."""
    scores = _grouped_matmul(query, key.transpose(-1, -2)).mul_(how.scale)
    if how.softcap is not None:
        scores.div_(how.softcap).tanh_().mul_(how.softcap)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf)


def _grouped_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[batch, groups, heads, n, k] times [batch, groups, k, m], float32 [batch, groups, heads, n, m]."""
    batch, groups, heads, length, width = left.shape
    found = _product(left.reshape(batch * groups, heads * length, width), right.reshape(-1, *right.shape[2:]))
    return found.view(batch, groups, heads, length, right.shape[-1])


def _matmul_sum_over_heads(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum over heads and n of [batch, groups, heads, n, k] times [..., n, m], float32 [batch, groups, k, m]."""
    batch, groups, heads, length, width = left.shape
    rows = left.reshape(batch * groups, heads * length, width).transpose(1, 2)
    found = _product(rows, right.reshape(batch * groups, heads * length, right.shape[-1]))
    return found.view(batch, groups, width, right.shape[-1])


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The batched matrix product in float32, regardless of the dtype of the factors."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)  # the unrounded sums of tensor cores
    return torch.bmm(left.float(), right.float())
