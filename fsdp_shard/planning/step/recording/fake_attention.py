"""Attention of a model that runs on fake tensors.

Attention implementations keep different tensors. Here it runs as on a CPU, whose fused kernel keeps the same tensors
as a GPU's flash attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate

from fsdp_shard.models import attention_implementations
from fsdp_shard.utils import FakeTensorMode

# transformers builds a causal mask whenever it meets fake tensors. Real training has masks only where rows are padded
# or a token sees only its neighbors; otherwise it uses kernels with a causal flag. This attention is sdpa with those
# masks.
_ATTENTION = "fsdp_shard_plan"

# Rows of one length; rows padded to one length, with a token mask; rows of several documents.
FULL, PADDED, PACKED = "full", "padded", "packed"


def _row_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask as large as that of rows that differ, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _filled_up_mask(
    *, batch_size: int, q_length: int, kv_length: int, has_encoder: bool, **kwargs: Any
) -> torch.Tensor | None:
    """The mask for padded rows; in a model with an encoder, the decoder has no token mask."""
    if has_encoder and "allow_is_bidirectional_skip" not in kwargs:  # decoder masks do not allow it
        return _local_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    return _row_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length)


def _local_mask(
    *, batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """The mask of sliding or chunked attention, the same for all rows; None if it would mask nothing."""
    if local_size is None or kv_length < local_size:
        return None
    return torch.ones((1, 1, q_length, kv_length), dtype=torch.bool).expand(batch_size, -1, -1, -1)


@contextmanager
def attention_without_values(model: PreTrainedModel, rows: str) -> Iterator[None]:
    """Give a model with sdpa attention the masks for such `rows`: FULL, PADDED or PACKED."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    padded = partial(_filled_up_mask, has_encoder=model.config.is_encoder_decoder)
    masks: dict[str, Callable[..., Any]] = {FULL: _local_mask, PADDED: padded, PACKED: _row_mask}
    AttentionMaskInterface.register(_ATTENTION, masks[rows])
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def layer_mask_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the masks of a single text by type of layer, from which those of packed pairs are made."""
    AttentionMaskInterface.register(_ATTENTION, _local_mask)
    config = type(model.config).from_dict(model.config.to_dict(), attn_implementation=_ATTENTION)
    with FakeTensorMode():
        made: Any = create_masks_for_generate(config, torch.empty(1, length, 1), None, None)
    masks = made.values() if isinstance(made, dict) else [made]
    return sum(mask.untyped_storage().nbytes() for mask in masks if mask is not None)
