"""Attention of a model that runs on fake tensors.

Attention keeps different tensors in different implementations; it runs as on a CPU, whose fused kernel keeps the same
as a GPU's flash attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_shard.models import attention_implementations

# transformers builds a causal mask whenever it meets fake tensors. Real training has masks only where rows are filled
# up or a token sees its neighbors; else kernels with a causal flag are used. This attention is sdpa with those masks.
_ATTENTION = "fsdp_shard_plan"


def _row_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask of the size of that of rows that differ, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _mask_if_needed(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    has_encoder: bool,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask where rows are filled up, or of sliding or chunked attention, which is equal for all rows.

    Of a model with an encoder, what fills up the rows of the decoder is not told.
    """
    is_told = not has_encoder or "allow_is_bidirectional_skip" in kwargs  # which decoders' masks do not allow
    if attention_mask is not None and is_told:
        return _row_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length)
    if local_size is None or kv_length < local_size:
        return None
    return torch.ones((1, 1, q_length, kv_length), dtype=torch.bool).expand(batch_size, -1, -1, -1)


@contextmanager
def attending_without_values(model: PreTrainedModel, *, is_packed: bool) -> Iterator[None]:
    """Have a model with sdpa attention get the masks that training has: if documents are packed, one everywhere."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    mask = partial(_mask_if_needed, has_encoder=model.config.is_encoder_decoder)
    AttentionMaskInterface.register(_ATTENTION, _row_mask if is_packed else mask)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
