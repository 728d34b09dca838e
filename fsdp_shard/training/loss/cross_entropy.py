"""Cross-entropy over a large vocabulary, without materializing all logits in float32.

The plain loss keeps three float32 arrays [num_tokens, vocabulary]: the upcast logits, their log-softmax and its
gradient. Here a few tokens at a time are upcast, and their gradient is computed with the loss and kept in the dtype of
the logits. Each chunk uses torch's own functions, so with a single chunk the result is bit-equal to the plain loss.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fsdp_shard.data import IGNORE_INDEX

# Bytes of float32 logits per chunk: on a CPU as many as fit in its cache, on a GPU enough to keep it busy.
_CHUNK_BYTES = {"cpu": 8 << 20}
_CHUNK_BYTES_ELSEWHERE = 128 << 20
_MAX_CHUNKS = 256  # more chunks cost calls and save hardly any memory


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """Compute the summed cross-entropy divided by `divisor`.

    Args:
        logits: [..., vocabulary], of any dtype.
        labels: [...], already shifted; labels equal to -100 are ignored.
        divisor: A number, or a scalar on the device; the division is in float32, before the gradient is rounded to the
            dtype of the logits.

    Returns:
        A float32 scalar in nats, which supports one backward pass.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    gradient = torch.empty_like(flat) if needs_gradient(flat) else None
    total = torch.zeros((), dtype=torch.float32, device=flat.device)
    num_rows = max(1, cross_entropy_chunk_bytes(flat.device.type, 4 * flat.numel()) // (4 * flat.shape[-1]))
    for start in range(0, len(targets), num_rows):
        rows = slice(start, min(start + num_rows, len(targets)))
        upcast = flat[rows].detach().float().requires_grad_(gradient is not None)
        loss = F.cross_entropy(upcast, targets[rows], ignore_index=IGNORE_INDEX, reduction="sum")
        if gradient is not None:
            gradient[rows] = torch.autograd.grad(loss / divisor, upcast)[0]
        total += loss.detach()
    return with_gradients(total / divisor, [gradient], flat)


def cross_entropy_chunk_bytes(device_type: str, logits_bytes: int) -> int:
    """How many of `logits_bytes` bytes of float32 logits `cross_entropy` upcasts at a time on a device."""
    return max(_CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE), -(-logits_bytes // _MAX_CHUNKS))


def needs_gradient(tensor: torch.Tensor | None) -> bool:
    """Whether autograd needs a gradient for `tensor`."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def with_gradients(
    loss: torch.Tensor, gradients: Sequence[torch.Tensor | None], *inputs: torch.Tensor | None
) -> torch.Tensor:
    """Return `loss` as a function of `inputs` with these gradients, for one backward pass, which overwrites them."""
    result: torch.Tensor = _WithGradients.apply(loss, gradients, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: Sequence[torch.Tensor | None], *inputs: Any) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of this loss was already used; run the forward pass again")
        return (None, None, *(None if gradient is None else gradient.mul_(grad_output) for gradient in gradients))
