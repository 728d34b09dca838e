"""What a loss head (`training.loss_head`) takes at its fullest, in the place of logits and their gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fsdp_shard.training import CHUNK_BYTES, use_loss_head

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def take_out_head(model: PreTrainedModel, chunked_loss: bool | str, num_rows: int) -> int | None:
    """Bytes of the loss head that training would use with `num_rows` tokens, or None where it would use logits.

    `model` (on meta) then gives its hidden state instead of logits. Raises ModelError as `use_loss_head` does.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if not use_loss_head(model, chunked_loss):
        return None
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "use_loss_head has seen to that"
    head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    weight = head.weight
    return head_bytes(
        num_rows, tuple(weight.shape), weight.dtype, is_capped=softcap is not None, is_trained=weight.requires_grad
    )


def head_bytes(
    num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_capped: bool = False, is_trained: bool = True
) -> int:
    """The most that the loss of `num_rows` tokens and its gradients take, for a head of `shape` in `dtype`."""
    vocabulary, width = shape
    chunk_rows = min(num_rows, max(1, CHUNK_BYTES // (4 * vocabulary)))
    itemsize, precise = dtype.itemsize, 4 if chunk_rows < num_rows else dtype.itemsize
    # Logits as they come and in float32; to cap them, twice more in float32.
    of_logits = (0 if itemsize == 4 else itemsize) + 4 * (3 if is_capped else 1)
    of_chunk = chunk_rows * (vocabulary * of_logits + width * itemsize)
    in_end = vocabulary * width * itemsize if is_trained and precise != itemsize else 0
    kept = num_rows * width * itemsize + (vocabulary * width * precise if is_trained else 0)
    return kept + max(of_chunk, in_end)
