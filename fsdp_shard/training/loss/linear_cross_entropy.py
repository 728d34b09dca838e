"""The loss out of hidden states and the output head together, so that the logits are never there as a whole.

The head's `forward` is replaced by one that returns the loss of some labels instead of logits, a few rows at a time,
its gradient made in the forward pass. It runs as the head does, inside the model's own forward pass: whatever shards
the model has the head's weight whole at that moment, tied or not, and reduces its gradient as it always does. Whether a
model hands on what its head gives, unchanged, is tried and not assumed (`_hands_on`): Cohere scales it, Gemma caps it.
Knows no wrapper and no rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from fsdp_shard.data import MASKED
from fsdp_shard.errors import ModelError

# From this vocabulary on the logits are what fills the memory, and products of a chunk are large enough to be quick.
_LARGE_VOCABULARY = 1 << 16
# Bytes of float32 logits in a chunk: not too few, as the gradient of the head's weight is read and written for each.
CHUNK_BYTES = 128 << 20


def use_loss_head(model: PreTrainedModel, when: bool | str) -> bool:
    """Let the output head of `model` (on meta, not sharded yet) give the loss: `when` is auto, true or false.

    With auto it does where the vocabulary is large and the model allows it. Whether it does; raises ModelError for true
    where the model does not allow it.
    """
    if when is False:
        return False
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if when == "auto" and (type(head) is not nn.Linear or head.out_features < _LARGE_VOCABULARY):
        return False
    reason = _install(model, head)
    if reason is not None and when is True:
        raise ModelError(
            f"model.chunked_loss=true cannot be had with {type(model).__name__}: {reason}. Set model.chunked_loss=auto."
        )
    return reason is None


@contextmanager
def giving_loss(module: nn.Module, labels: torch.Tensor, divisor: float) -> Iterator[bool]:
    """Whether `module` has a loss head. Inside, its `logits` are then the loss of `labels` over `divisor`."""
    head = _head_of(module)
    if head is None:
        yield False
        return
    head.wanted = labels, divisor
    try:
        yield True
    finally:
        head.wanted = None


class LossHead:
    """The `forward` of an output head that gives the loss when one is `wanted`, and logits otherwise."""

    def __init__(self, head: nn.Linear, softcap: float | None) -> None:
        self._head = head
        self._softcap = softcap
        self.wanted: tuple[torch.Tensor, float] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        if self.wanted is None:
            logits = F.linear(hidden, weight, bias)
            return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap
        labels, divisor = self.wanted
        flat, counted = hidden.flatten(0, -2), labels.flatten()
        assert len(flat) == len(counted), "the model gave its head other positions than there are labels for"
        loss = linear_cross_entropy(flat, weight, bias, counted, divisor, self._softcap)
        return loss + loss.new_zeros([1] * hidden.ndim)  # the dimensions of logits; FSDP2 warns of a view


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    divisor: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of `labels` [n] over `divisor`; logits are `hidden` [n, h] x `weight` [v, h] + `bias` [v].

    With `softcap` the logits are softcap * tanh(logits / softcap). Labels of -100 do not count, and cost nothing. A
    float32 scalar in nats that can be differentiated once.
    """
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, divisor, softcap)  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made with the loss and handed out, once, when they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: float,
        softcap: float | None,
    ) -> torch.Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        wanted = of_hidden or of_weight or of_bias
        rows = torch.nonzero(labels != MASKED).flatten()
        num_rows = max(1, CHUNK_BYTES // (4 * len(weight)))
        chunks = [rows[start : start + num_rows] for start in range(0, len(rows), num_rows)]
        precise = weight.dtype if len(chunks) <= 1 else torch.float32
        slope_hidden = torch.zeros_like(hidden) if of_hidden else None
        slope_weight = torch.zeros(weight.shape, dtype=precise, device=weight.device) if of_weight else None
        slope_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if of_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in chunks:
            part = hidden[chunk]
            loss, slope = _sum_and_slope(F.linear(part, weight, bias), labels[chunk], divisor, softcap, wanted)
            total += loss
            if slope_bias is not None:
                slope_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if slope_hidden is not None:
                slope_hidden[chunk] = slope @ weight
            if slope_weight is not None:
                _add_product(slope_weight, slope, part)
            del part, slope  # before the next chunk has its own
        ctx.slopes = (
            slope_hidden,
            None if slope_weight is None else slope_weight.to(weight.dtype),
            None if slope_bias is None or bias is None else slope_bias.to(bias.dtype),
        )
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The kept gradients times `slope`, in their own memory: a second backward pass is refused."""
        slopes, ctx.slopes = ctx.slopes, None
        if slopes is None:
            raise RuntimeError("the gradient of this loss was already used; run the forward pass again")
        return (*(None if kept is None else kept.mul_(slope) for kept in slopes), None, None, None)


def _sum_and_slope(
    logits: torch.Tensor, labels: torch.Tensor, divisor: float, softcap: float | None, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of a chunk, and the float32 slope of (the sum / divisor) by the logits, which are overwritten."""
    values = logits.float()
    inner = None
    if softcap is not None:
        values.div_(softcap).tanh_()
        inner = (1 - values * values) if wanted else None  # the slope of the cap
        values.mul_(softcap)
    picked = values.gather(1, labels[:, None])
    highest = values.amax(1, keepdim=True)
    values.sub_(highest).exp_()
    sums = values.sum(1, keepdim=True)
    total = (sums.log() + highest - picked).sum()
    if wanted:
        values.div_(sums * divisor)
        values.scatter_add_(1, labels[:, None], torch.full_like(picked, -1 / divisor))
        if inner is not None:
            values.mul_(inner)
    return total, values


def _add_product(into: torch.Tensor, slope: torch.Tensor, part: torch.Tensor) -> None:
    """Add slope^T @ part to `into`, which may be more precise than they are; then a part of its rows at a time."""
    if into.dtype == part.dtype:
        into.addmm_(slope.T, part)
        return
    for rows, columns in zip(into.tensor_split(16), slope.tensor_split(16, dim=1), strict=True):
        rows += columns.T @ part


def _install(model: PreTrainedModel, head: nn.Module | None) -> str | None:
    """Put a LossHead into `model`; why that cannot be, if it cannot."""
    if type(head) is not nn.Linear:
        return "its output head is not a plain linear layer"
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        config.final_logit_softcapping = None  # the head does it
    if not _hands_on(model, head):
        if softcap is not None:
            config.final_logit_softcapping = softcap
        return "it changes the logits after its output head"
    head.forward = LossHead(head, softcap)  # type: ignore[assignment]  # is one
    return None


def _hands_on(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Whether the logits of `model` are exactly what its head gives: tried with stand-ins for all that is not on the
    way to the head, and one for the head that gives known numbers.
    """
    known = torch.tensor([[[1.0, -2.0, 30.0]]])
    path = next(name for name, module in model.named_modules() if module is head).split(".")
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    owner: nn.Module = model
    for name in path:
        replaced += [(owner, n, child) for n, child in owner.named_children() if n != name or child is head]
        owner = owner.get_submodule(name)
    try:
        body = _Outputs(last_hidden_state=torch.zeros(1, 1, head.in_features))
        for parent, name, child in replaced:
            parent._modules[name] = _Gives(known if child is head else body)
        names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
        with torch.no_grad():
            inputs = {name: torch.zeros(1, 1, dtype=torch.long) for name in names}
            logits = model(**inputs, use_cache=False).logits
        return logits.shape == known.shape and bool(torch.equal(logits.cpu(), known))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError):
        return False
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


class _Gives(nn.Module):
    """A stand-in for a module, which gives the same whatever it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._value


class _Outputs(BaseModelOutputWithPastAndCrossAttentions):
    """Outputs that have None for all that a model may ask of its body beside the hidden state."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


_heads: WeakKeyDictionary[nn.Module, LossHead | None] = WeakKeyDictionary()


def _head_of(module: nn.Module) -> LossHead | None:
    """The LossHead in `module`, looked for once."""
    if module not in _heads:
        found = (inner.__dict__.get("forward") for inner in module.modules())
        _heads[module] = next((forward for forward in found if isinstance(forward, LossHead)), None)
    return _heads[module]
