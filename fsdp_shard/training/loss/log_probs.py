"""Log-probabilities of labels, from hidden states and the output head together or from logits, a few rows at a time.

Unlike the cross-entropy, losses of preferences are not linear in them, so their gradient is known in the backward pass
only: the logits of each chunk are computed again there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fsdp_shard.data import MASKED

# Bytes of float32 logits in a chunk.
_CHUNK_BYTES = 128 << 20


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the log-probability of each label under the logits `hidden @ weight.T + bias`, in chunks.

    Args:
        hidden: Hidden states [num_tokens, hidden_size].
        weight: Weight of the output head [vocabulary, hidden_size].
        bias: Bias of the output head [vocabulary], if any.
        labels: [num_tokens]; those equal to -100 do not count, and cost nothing.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).
        counted: Positions of the labels that count, int64 [num_counted]; where None, a GPU is waited for to find them.

    Returns:
        float32 [num_tokens] in nats, 0 where labels do not count; it can be differentiated once.
    """
    rows = torch.nonzero(labels != MASKED).flatten() if counted is None else counted
    result: torch.Tensor = _LinearLogProbs.apply(hidden, weight, bias, labels, rows, softcap)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def log_probs_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the log-probability of each label under `logits` [..., vocabulary], upcast a few rows at a time.

    The other arguments, and what is returned, are those of `linear_log_probs`, with the shape of `labels` [...].
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    rows = torch.nonzero(targets != MASKED).flatten() if counted is None else counted
    result: torch.Tensor = _LogProbs.apply(flat, targets, rows)  # type: ignore[no-untyped-call]  # untyped in torch
    return result.view(labels.shape)


def _chunks(rows: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, ...]:
    return rows.split(max(1, _CHUNK_BYTES // (4 * vocabulary))) if len(rows) else ()


def _values(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [num_rows] of `labels` [num_rows] under float32 logits [num_rows, vocabulary]."""
    return logits.gather(1, labels[:, None]).squeeze(1) - logits.logsumexp(1)


def _slope(logits: torch.Tensor, labels: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """The gradient of `outer` [num_rows] @ the log-probabilities by float32 logits, which are overwritten."""
    slope = logits.sub_(logits.logsumexp(1, keepdim=True)).exp_().mul_(-outer[:, None])
    return slope.scatter_add_(1, labels[:, None], outer[:, None])


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rows: torch.Tensor,
        softcap: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels, rows)
        ctx.softcap = softcap
        result = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for chunk in _chunks(rows, len(weight)):
            logits = F.linear(hidden[chunk], weight, bias).float()
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            result[chunk] = _values(logits, labels[chunk])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, rows = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        chunks = _chunks(rows, len(weight))
        precise = weight.dtype if len(chunks) <= 1 else torch.float32
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for chunk in chunks:
            part = hidden[chunk]
            logits, inner = F.linear(part, weight, bias).float(), None
            if ctx.softcap is not None:
                logits.div_(ctx.softcap).tanh_()
                inner = 1 - logits * logits  # the derivative of the cap
                logits.mul_(ctx.softcap)
            slope = _slope(logits, labels[chunk], outer[chunk])
            slope = slope if inner is None else slope.mul_(inner)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ part
        found = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        return (*(None if grad is None else grad.to(of.dtype) for grad, of in found), None, None, None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, labels, rows)
        result = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
        for chunk in _chunks(rows, logits.shape[1]):
            result[chunk] = _values(logits[chunk].float(), labels[chunk])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, rows = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for chunk in _chunks(rows, logits.shape[1]):
            gradient[chunk] = _slope(logits[chunk].float(), labels[chunk], outer[chunk]).to(logits.dtype)
        return gradient, None, None
