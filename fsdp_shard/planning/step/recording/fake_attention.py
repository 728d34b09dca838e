"""Attention of a model that runs on fake tensors.

Attention keeps different tensors in different implementations; it runs as on a CPU, whose fused kernel keeps the same
as a GPU's flash attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_shard.models import attention_implementations

# transformers builds a causal mask whenever it meets fake tensors; real training without padding has none, so that
# kernels with a causal flag are used, but where a token sees its neighbors only. This attention is sdpa with that mask.
_ATTENTION = "fsdp_shard_plan"


def _document_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask of the size of that of packed documents, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _local_mask(
    *, batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """A mask of the size of that of sliding or chunked attention, equal for all rows; None if it would mask nothing."""
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
    AttentionMaskInterface.register(_ATTENTION, _document_mask if is_packed else _local_mask)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
