"""Attention of a model that runs on fake tensors.

Attention keeps different tensors in different implementations; it runs as on a CPU, whose fused kernel keeps the same
as a GPU's flash attention.
"""

from collections.abc import Callable, Iterator
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

# Rows of one length; rows that are padded to one, with a mask of their tokens; rows of several documents.
FULL, FILLED_UP, PACKED = "full", "filled up", "packed"


def _row_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask of the size of that of rows that differ, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _filled_up_mask(
    *, batch_size: int, q_length: int, kv_length: int, has_encoder: bool, **kwargs: Any
) -> torch.Tensor | None:
    """The mask where rows are padded; of a model with an encoder, those of the decoder have no mask of their tokens."""
    if has_encoder and "allow_is_bidirectional_skip" not in kwargs:  # which masks of decoders do not allow
        return _local_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    return _row_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length)


def _local_mask(
    *, batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """The mask of sliding or chunked attention, equal for all rows; None if it would mask nothing."""
    if local_size is None or kv_length < local_size:
        return None
    return torch.ones((1, 1, q_length, kv_length), dtype=torch.bool).expand(batch_size, -1, -1, -1)


@contextmanager
def attending_without_values(model: PreTrainedModel, rows: str) -> Iterator[None]:
    """Have a model with sdpa attention get the masks that it has for such `rows`: FULL, FILLED_UP or PACKED."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    filled_up = partial(_filled_up_mask, has_encoder=model.config.is_encoder_decoder)
    masks: dict[str, Callable[..., Any]] = {FULL: _local_mask, FILLED_UP: filled_up, PACKED: _row_mask}
    AttentionMaskInterface.register(_ATTENTION, masks[rows])
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
