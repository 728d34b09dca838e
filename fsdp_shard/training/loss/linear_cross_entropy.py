"""Computes the loss directly from hidden states and the output head, so the full logits are never in memory.

The head's `forward` is replaced by one that returns the loss of some labels instead of logits, a few rows at a time,
with the gradient. It runs in place of the head, inside the model's own forward pass: the wrapper gathers the head's
weight at that moment, tied or not, and reduces its gradient as usual. A trial run checks that a model returns the
logits of its head unchanged (`_returns_logits`): Cohere scales them, Gemma caps them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from fsdp_shard.data import IGNORE_INDEX
from fsdp_shard.errors import ModelError
from fsdp_shard.training.loss.cross_entropy import needs_gradient, with_gradients
from fsdp_shard.training.loss.row_values import RowFunction, add_product, linear_rows, rows_per_chunk

# From this vocabulary size, logits dominate memory, and the matrix products of a chunk are large enough to be fast.
_LARGE_VOCABULARY = 1 << 16
# Number of chunks of float32 logits whose rows share one product with the head. Each product reads the weight and adds
# to its gradient; with few rows, that takes longer on a GPU than the product itself.
_CHUNKS_PER_PRODUCT = 4


def use_loss_head(model: PreTrainedModel, when: bool | str, *, any_vocabulary: bool = False) -> bool:
    """Make the output head of a model compute the loss.

    Args:
        model: The model, not sharded yet.
        when: True, False, or "auto" for large vocabularies if the model supports it.
        any_vocabulary: Whether "auto" includes small vocabularies.

    Returns:
        Whether the head computes the loss.

    Raises:
        ModelError: `when` is true, but the model does not support it.
    """
    if when is False:
        return False
    head = model.get_output_embeddings()
    if when == "auto" and type(head) is not nn.Linear:
        return False
    if when == "auto" and not any_vocabulary and head.out_features < _LARGE_VOCABULARY:
        return False
    reason = _install(model, head)
    if reason is not None and when is True:
        raise ModelError(
            f"model.chunked_loss=true does not work with {type(model).__name__}: {reason}. Set model.chunked_loss=auto."
        )
    return reason is None


@contextmanager
def head_returns_loss(
    module: nn.Module, labels: torch.Tensor, divisor: float | torch.Tensor, label_positions: torch.Tensor | None = None
) -> Iterator[bool]:
    """Within the block, a model with a loss head returns the loss of `labels` divided by `divisor` as its `logits`.

    Args:
        module: The model.
        labels: [...], already shifted; labels equal to -100 are ignored.
        divisor: What the sum is divided by: a number, or a float32 scalar on the device.
        label_positions: Positions of the other labels in the flattened labels, int64; computed if None.

    Yields:
        Whether the model has a loss head.
    """
    targets = labels.flatten()

    def loss(hidden: torch.Tensor, head: nn.Linear, softcap: float | None) -> torch.Tensor:
        flat = _flat(hidden, len(targets))
        total = linear_cross_entropy(flat, head.weight, head.bias, targets, divisor, softcap, label_positions)
        return total + total.new_zeros([1] * hidden.ndim)  # the dimensions of logits; FSDP2 warns of a view

    with _with_output(module, loss) as has_head:
        yield has_head


@contextmanager
def head_returns_rows(module: nn.Module, num_tokens: int, rows: torch.Tensor, function: RowFunction) -> Iterator[bool]:
    """Within the block, a model with a loss head returns the values of `function` as its `logits` [..., num_values].

    Args:
        module: The model.
        num_tokens: Tokens of the batch.
        rows: Positions of the tokens to compute values for, int64 [num_rows].
        function: The values.

    Yields:
        Whether the model has a loss head.
    """

    def values(hidden: torch.Tensor, head: nn.Linear, softcap: float | None) -> torch.Tensor:
        flat = _flat(hidden, num_tokens)
        return linear_rows(flat, head.weight, head.bias, rows, function, softcap).view(*hidden.shape[:-1], -1)

    with _with_output(module, values) as has_head:
        yield has_head


def _flat(hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
    flat = hidden.flatten(0, -2)
    assert len(flat) == num_tokens, "the model passed other positions to its head than there are labels for"
    return flat


# Maps hidden states, the head and its softcap to the value that the model returns instead of logits.
_Wanted = Callable[[torch.Tensor, nn.Linear, float | None], torch.Tensor]


@contextmanager
def _with_output(module: nn.Module, wanted: _Wanted) -> Iterator[bool]:
    head = _head_of(module)
    if head is None:
        yield False
        return
    head.wanted = wanted
    try:
        yield True
    finally:
        head.wanted = None


class LossHead:
    """The `forward` of an output head; returns the loss or token values on request, otherwise logits."""

    def __init__(self, head: nn.Linear, softcap: float | None) -> None:
        self._head, self._softcap = head, softcap
        self.wanted: _Wanted | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.wanted is not None:
            return self.wanted(hidden, self._head, self._softcap)
        logits = F.linear(hidden, self._head.weight, self._head.bias)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    divisor: float | torch.Tensor,
    softcap: float | None = None,
    label_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the summed cross-entropy of the logits `hidden @ weight.T + bias`, divided by `divisor`, in chunks.

    Args:
        hidden: Hidden states [num_tokens, hidden_size].
        weight: Weight of the output head [vocabulary, hidden_size].
        bias: Bias of the output head [vocabulary], if any.
        labels: [num_tokens]; labels equal to -100 are ignored, and cost nothing.
        divisor: What the sum is divided by: a number, or a float32 scalar on the device, which is not waited for.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).
        label_positions: Positions of the other labels, int64 [num_predictions]; if None, finding them waits for a GPU.

    Returns:
        A float32 scalar in nats, which supports one backward pass.
    """
    of_hidden, of_weight, of_bias = map(needs_gradient, (hidden, weight, bias))
    with torch.no_grad():
        rows = torch.nonzero(labels != IGNORE_INDEX).flatten() if label_positions is None else label_positions
        num_rows = rows_per_chunk(len(weight))
        chunks = rows.split(_CHUNKS_PER_PRODUCT * num_rows) if len(rows) else ()
        # The gradients are divided at the end; before that, their sums may overflow float16.
        is_enough = len(chunks) <= 1 and weight.dtype != torch.float16
        precise = weight.dtype if is_enough else torch.float32
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in chunks:
            part = hidden[chunk]
            wanted = of_hidden or of_weight or of_bias
            grad_logits = F.linear(part, weight, bias)  # the logits, until the loop overwrites them
            for some, targets in zip(grad_logits.split(num_rows), labels[chunk].split(num_rows), strict=True):
                total += _loss_and_gradient(some, targets, softcap, wanted)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits, part)
            del part, grad_logits, some  # before the next chunk allocates its own
        found = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        gradients = [None if grad is None or of is None else grad.div_(divisor).to(of.dtype) for grad, of in found]
    return with_gradients(total / divisor, gradients, hidden, weight, bias)


def _loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, softcap: float | None, wanted: bool) -> torch.Tensor:
    """Return the summed loss of some rows of logits; if `wanted`, overwrite the logits with its gradient."""
    values, cap_derivative = logits, None
    if softcap is not None:
        values = logits.float().div_(softcap).tanh_()
        cap_derivative = (1 - values * values) if wanted else None
        values.mul_(softcap)
    log_probs = F.log_softmax(values, 1, dtype=torch.float32)
    del values
    picked = log_probs.gather(1, labels[:, None])
    if wanted:
        torch.exp(log_probs, out=logits)
        logits.scatter_(1, labels[:, None], torch.expm1(picked).to(logits.dtype))
        if cap_derivative is not None:
            logits.mul_(cap_derivative)
    return -picked.sum()


def _install(model: PreTrainedModel, head: nn.Module | None) -> str | None:
    """Install a LossHead in `model`; return the reason if that is impossible."""
    if type(head) is not nn.Linear:
        return "its output head is not a plain linear layer"
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:  # bypasses the check of Gemma3n's config, which requires a number
        vars(config)["final_logit_softcapping"] = None  # the head applies it
    if not _returns_logits(model, head):
        if softcap is not None:
            vars(config)["final_logit_softcapping"] = softcap
        return "it changes the logits after its output head"
    head.forward = LossHead(head, softcap)  # type: ignore[assignment]  # is one
    return None


def _returns_logits(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Whether the logits of `model` are exactly the output of its head.

    Run the model with stand-ins for all modules that are not on the path to the head, and a stand-in for the head that
    returns known numbers.
    """
    known = torch.tensor([[[1.0, -2.0, 30.0]]])
    path = next(name for name, module in model.named_modules() if module is head).split(".")
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    owner: nn.Module = model
    for name in path:
        replaced += [(owner, n, child) for n, child in owner.named_children() if n != name or child is head]
        owner = owner.get_submodule(name)
    try:
        hidden = torch.zeros(1, 1, head.in_features)
        body = _Outputs(last_hidden_state=hidden)
        for parent, name, child in replaced:
            is_layer = next(child.children(), None) is None
            parent.register_module(name, _StandIn(child, known if child is head else hidden if is_layer else body))
        names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
        with torch.no_grad():
            inputs = {name: torch.zeros(1, 1, dtype=torch.long) for name in names}
            logits = model(**inputs, use_cache=False).logits
        return logits.shape == known.shape and bool(torch.equal(logits.cpu(), known))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError):
        return False
    finally:
        for parent, name, child in replaced:
            parent.register_module(name, child)


class _StandIn(nn.Module):
    """Stands in for a module: it and its submodules return one value for any input; attributes are the module's."""

    def __init__(self, module: nn.Module, value: Any) -> None:
        super().__init__()
        vars(self)["_module"], self._value = module, value  # not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        found = getattr(vars(self)["_module"], name)
        return _StandIn(found, self._value) if isinstance(found, nn.Module) else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._value


class _Outputs(BaseModelOutputWithPastAndCrossAttentions):
    """Outputs that are all None except the hidden state."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


_FOUND = "loss_head"  # an attribute of the model


def _head_of(module: nn.Module) -> LossHead | None:
    """The LossHead in `module`, which is searched once.

    The module stores the result: a sharded head refers to the whole model, which a global dictionary would keep alive.
    """
    if _FOUND not in vars(module):
        found = (vars(inner).get("forward") for inner in module.modules())
        vars(module)[_FOUND] = next((forward for forward in found if isinstance(forward, LossHead)), None)
    head: LossHead | None = vars(module)[_FOUND]
    return head
