"""Cross-entropy of the next token over a large vocabulary, without ever holding the logits in float32 as a whole.

The plain loss keeps three float32 arrays [num_tokens, vocabulary]: the logits upcast, their log-softmax and its
gradient. Here a few tokens at a time are upcast, and their gradient is computed in the forward pass and kept in the
logits' own dtype. Both are torch's own for that chunk: where one chunk is all, they equal the plain loss bit by bit.
Knows nothing of ranks: the caller says what the sum is divided by.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fsdp_shard.data import MASKED

# Bytes of float32 logits in a chunk: on a CPU what its cache holds, on a GPU enough to keep it busy.
_CHUNK_BYTES = {"cpu": 8 << 20}
_CHUNK_BYTES_ELSEWHERE = 128 << 20


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
    """Summed cross-entropy of `labels` [...] under `logits` [..., vocabulary], over `divisor`: a float32 scalar, nats.

    Labels are already shifted; those equal to -100 do not count. The result can be differentiated once. The division
    is made in float32, before the gradient is rounded to the dtype of the logits.
    """
    flat = logits.flatten(0, -2)
    if not torch.is_grad_enabled():  # which `needs_input_grad` does not tell
        flat = flat.detach()
    result: torch.Tensor = _ChunkedCrossEntropy.apply(flat, labels.flatten(), divisor)  # type: ignore[no-untyped-call]
    return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient is made with the loss and handed out, once, when it is asked for."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
        """Sum over chunks; logits [num_tokens, vocabulary], labels [num_tokens]."""
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        num_rows = max(1, _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ELSEWHERE) // (4 * logits.shape[-1]))
        for start in range(0, len(labels), num_rows):
            rows = slice(start, start + num_rows)
            total += _sum_and_slope(logits[rows], labels[rows], divisor, None if gradient is None else gradient[rows])
        ctx.gradient = gradient
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The kept gradient times `slope`, in its own memory: a second backward pass is refused."""
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of this loss was already used; run the forward pass again")
        return gradient.mul_(slope), None, None


def _sum_and_slope(
    logits: torch.Tensor, labels: torch.Tensor, divisor: float, gradient: torch.Tensor | None
) -> torch.Tensor:
    """The summed loss of a chunk; `gradient`, unless it is None, is filled with the slope of (the sum / divisor)."""
    with torch.set_grad_enabled(gradient is not None):
        upcast = logits.detach().float().requires_grad_(gradient is not None)
        total = F.cross_entropy(upcast, labels, ignore_index=MASKED, reduction="sum")
        if gradient is not None:
            gradient.copy_(torch.autograd.grad(total / divisor, upcast)[0])
    return total.detach()
