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
# kernels with a causal flag are used. This attention is sdpa without a mask.
_ATTENTION = "fsdp_shard_plan"


def _document_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask of the size of that of packed documents, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


@contextmanager
def attending_without_values(model: PreTrainedModel, *, is_packed: bool) -> Iterator[None]:
    """Have a model with sdpa attention use its causal flag instead of a mask, or a mask if documents are packed."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _document_mask if is_packed else lambda *args, **kwargs: None)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
