"""Peak memory of a chunked loss head, which replaces the logits and their gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fsdp_shard.training import LOSS_CHUNK_BYTES, use_loss_head

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def take_out_head(model: PreTrainedModel, chunked_loss: bool | str, num_rows: int) -> int | None:
    """Have `model` return its hidden state instead of logits, where training would use a chunked loss.

    Args:
        model: The model, on meta.
        chunked_loss: The setting `model.chunked_loss`.
        num_rows: Number of tokens in a micro-batch.

    Returns:
        Bytes of the loss head, or None where training would use logits.

    Raises:
        ModelError: `chunked_loss` is true and the model cannot be used with it.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if not use_loss_head(model, chunked_loss):
        return None
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "use_loss_head has checked it"
    head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    weight = head.weight
    return head_bytes(
        num_rows, tuple(weight.shape), weight.dtype, is_capped=softcap is not None, is_trained=weight.requires_grad
    )


def head_bytes(
    num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_capped: bool = False, is_trained: bool = True
) -> int:
    """Peak bytes of the loss of `num_rows` tokens and its gradients, for a head of shape [vocabulary, width]."""
    vocabulary, width = shape
    chunk_rows = min(num_rows, max(1, LOSS_CHUNK_BYTES // (4 * vocabulary)))
    itemsize, precise = dtype.itemsize, 4 if chunk_rows < num_rows else dtype.itemsize
    # Logits as they come and in float32; to cap them, twice more in float32.
    of_logits = (0 if itemsize == 4 else itemsize) + 4 * (3 if is_capped else 1)
    of_chunk = chunk_rows * (vocabulary * of_logits + width * itemsize)
    in_end = vocabulary * width * itemsize if is_trained and precise != itemsize else 0
    kept = num_rows * width * itemsize + (vocabulary * width * precise if is_trained else 0)
    return kept + max(of_chunk, in_end)
