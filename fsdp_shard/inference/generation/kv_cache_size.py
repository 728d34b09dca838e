"""Estimates the memory of the KV cache and of recurrent states, block by block, from a model without weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import transformers
from packaging.version import Version
from transformers import PretrainedConfig

from fsdp_shard.inference.config import GenerationSettings
from fsdp_shard.models import Block
from fsdp_shard.utils import format_count

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class KVCacheBudget:
    """Contents of the KV cache: `num_tokens` (prompt and answer) for each of `batch_size` texts."""

    batch_size: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{format_count(self.batch_size, 'text')} of {format_count(self.num_tokens, 'token')}"


_FLOAT32_BYTES = 4
_CONVERSATION = 4096  # tokens to reserve for a conversation, whose length is not known in advance


def kv_cache_budget(encoded: Sequence[Sequence[int]], settings: GenerationSettings) -> KVCacheBudget | None:
    """The budget for completing `encoded` prompts, or for a conversation without prompts; None without a cache."""
    if settings.cache == "none":
        return None
    longest = max(map(len, encoded), default=_CONVERSATION)
    num_texts = max(min(settings.batch_size, len(encoded)), 1) * settings.num_beams
    return KVCacheBudget(num_texts, longest + settings.max_new_tokens)


def cached_blocks(model: "PreTrainedModel", blocks: Sequence[Block]) -> list[Block]:
    """The blocks with a KV cache: the decoder's layers, without those of an encoder of text, images or sound."""
    repeated = [block for block in blocks if block.repeated]
    if model.config.is_encoder_decoder:
        return [block for block in repeated if "decoder" in block.fqn.split(".")]
    decoder = model.get_decoder()
    prefix = next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")
    return [block for block in repeated if block.fqn.startswith(prefix)] or repeated


def cache_bytes(model: "PreTrainedModel", blocks: Sequence[Block], budget: KVCacheBudget) -> dict[str, int]:
    """Bytes of the KV cache of each block, and of its recurrent states.

    It is an upper bound, which counts a sliding window as full attention, and attention in each layer if in any.

    Args:
        model: The model in the compute dtype; it may be on meta.
        blocks: Its blocks.
        budget: Number and length of the texts.

    Returns:
        Block FQN -> bytes, of the blocks with a cache.
    """
    size = model.dtype.itemsize
    of_attention = size * budget.num_tokens * _attention_values(model.config.get_text_config())
    found = {}
    for block in cached_blocks(model, blocks):
        of_states = sum(_state_bytes(module, size) for module in model.get_submodule(block.fqn).modules())
        found[block.fqn] = budget.batch_size * (of_attention + of_states)
    return found


def _attention_values(text: PretrainedConfig) -> int:
    """Values that a layer caches of each token; 0 for a model without attention heads."""
    num_heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if not num_kv_heads or not hidden or not num_heads:
        return 0
    head_dim = getattr(text, "head_dim", None) or hidden // num_heads
    return _latent_values(text) or int(2 * num_kv_heads * head_dim)


def _state_bytes(module: "nn.Module", element_bytes: int) -> int:
    """Bytes of a text's states in a layer: of Mamba, whose states may be in float32, and of the gated delta rule."""
    convolution = getattr(module, "conv1d", None)
    if convolution is None:
        return 0
    values = 0
    for names in (("intermediate_size", "ssm_state_size"), ("num_v_heads", "head_k_dim", "head_v_dim")):
        if all(hasattr(module, name) for name in names):
            values = prod(getattr(module, name) for name in names)
    kernel = convolution.weight.numel() if values else 0  # the inputs that it covers
    return _FLOAT32_BYTES * values + element_bytes * kernel


def _latent_values(text: PretrainedConfig) -> int:
    """Values per token that a layer of multi-head latent attention (DeepSeek's) caches; 0 for other models."""
    latent, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if not latent or not rotary:
        return 0
    of_indexer = getattr(text, "index_head_dim", None) or 0
    if Version(transformers.__version__) >= Version("5.23"):
        return int(latent + rotary + of_indexer)
    # Earlier versions cached the keys and values computed from them.
    return int(text.num_attention_heads * (text.qk_nope_head_dim + rotary + text.v_head_dim) + of_indexer)
