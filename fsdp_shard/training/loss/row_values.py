"""Values of each predicted token, such as its log-probability, from the output head or from logits, in chunks of rows.

Unlike with the cross-entropy, the loss need not be linear in these values, so their gradient is known only in the
backward pass. It recomputes the logits of each chunk, so the full logits never exist.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Bytes of float32 logits per chunk: not too few, as each chunk reads and writes the gradient of the head's weight.
LOSS_CHUNK_BYTES = 128 << 20
_TILE = 128  # rows per tile of a matrix product on a GPU


class RowFunction(Protocol):
    """Computes values from rows of logits; it stores any other inputs, in the order of all rows."""

    @property
    def num_values(self) -> int:
        """Number of values per row."""

    def select(self, rows: torch.Tensor) -> "RowFunction":
        """Return the function for some of the rows, int64 [num_chosen]."""

    def values(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the values, float32 [num_rows, num_values], of rows of `logits`, float32 [num_rows, vocabulary].

        Args:
            logits: They may be overwritten.
            part: Range of these rows among all rows.
        """

    def grad_logits(self, logits: torch.Tensor, part: slice, grad_values: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sum of `grad_values` * values with respect to the logits.

        Args:
            logits: They may be overwritten.
            part: Range of these rows among all rows.
            grad_values: Float32 [num_rows, num_values].
        """


def linear_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    function: RowFunction,
    softcap: float | None,
) -> torch.Tensor:
    """Compute values of the logits `hidden @ weight.T + bias`, in chunks.

    Args:
        hidden: Hidden states [num_tokens, hidden_size].
        weight: Weight of the output head [vocabulary, hidden_size].
        bias: Bias of the output head [vocabulary], if any.
        rows: The tokens to compute values for, int64 [num_rows]; others cost nothing.
        function: The values.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).

    Returns:
        float32 [num_tokens, num_values], 0 for other tokens; it supports one backward pass.
    """
    rows = rows.to(hidden.device)
    result: torch.Tensor = _LinearRows.apply(hidden, weight, bias, rows, function, softcap)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def rows_of_logits(logits: torch.Tensor, rows: torch.Tensor, function: RowFunction) -> torch.Tensor:
    """Compute values of `logits` [num_tokens, vocabulary], upcast a few rows at a time.

    The other arguments and the result are those of `linear_rows`.
    """
    result: torch.Tensor = _Rows.apply(logits, rows.to(logits.device), function)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def rows_per_chunk(vocabulary: int) -> int:
    """Number of rows of logits per chunk of float32 values; a multiple of the tile if more than one tile."""
    rows = max(1, LOSS_CHUNK_BYTES // (4 * vocabulary))
    return rows if rows < _TILE else rows - rows % _TILE


def _parts(num_rows: int, vocabulary: int) -> list[slice]:
    size = rows_per_chunk(vocabulary)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: torch.Tensor,
        function: RowFunction,
        softcap: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, rows)
        ctx.function, ctx.softcap = function, softcap
        result = torch.zeros(len(hidden), function.num_values, dtype=torch.float32, device=hidden.device)
        for part in _parts(len(rows), len(weight)):
            logits = F.linear(hidden[rows[part]], weight, bias).float()
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            result[rows[part]] = function.values(logits, part)
            del logits  # before the next chunk allocates its own
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, rows = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        parts = _parts(len(rows), len(weight))
        precise = weight.dtype if len(parts) <= 1 else torch.float32
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for part in parts:
            chunk = rows[part]
            inputs = hidden[chunk]
            logits, cap_derivative = F.linear(inputs, weight, bias).float(), None
            if ctx.softcap is not None:
                logits.div_(ctx.softcap).tanh_()
                cap_derivative = 1 - logits * logits
                logits.mul_(ctx.softcap)
            grad_logits = ctx.function.grad_logits(logits, part, grad_output[chunk])
            grad_logits = grad_logits if cap_derivative is None else grad_logits.mul_(cap_derivative)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits, inputs)
            del logits, grad_logits, cap_derivative
        found = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        return (*(None if grad is None else grad.to(of.dtype) for grad, of in found), None, None, None)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: torch.Tensor, function: RowFunction) -> torch.Tensor:
        ctx.save_for_backward(logits, rows)
        ctx.function = function
        result = torch.zeros(len(logits), function.num_values, dtype=torch.float32, device=logits.device)
        for part in _parts(len(rows), logits.shape[1]):
            result[rows[part]] = function.values(logits[rows[part]].float(), part)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, rows = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for part in _parts(len(rows), logits.shape[1]):
            chunk = rows[part]
            gradient[chunk] = ctx.function.grad_logits(logits[chunk].float(), part, grad_output[chunk]).to(logits.dtype)
        return gradient, None, None


def add_product(into: torch.Tensor, grad_logits: torch.Tensor, part: torch.Tensor) -> None:
    """Add grad_logits^T @ part to `into`, whose dtype is theirs or float32.

    On a GPU, the product is added in float32; elsewhere torch lacks such a product, and rows are added in chunks. Sums
    may overflow float16.
    """
    if into.dtype == part.dtype:
        into.addmm_(grad_logits.T, part)
        return
    if into.is_cuda:
        torch.addmm(into, grad_logits.T, part, out_dtype=torch.float32, out=into)
        return
    if part.dtype == torch.float16:
        part = part.float()
    for rows, columns in zip(into.tensor_split(16), grad_logits.tensor_split(16, dim=1), strict=True):
        rows += columns.T.to(part.dtype) @ part
