"""Attention for sequences divided over ranks, as an implementation of transformers' attention interface.

A model creates its masks once per forward pass and passes them to its layers. Here, a mask is an object that describes
the whole sequence (`SequenceMask`), so a layer needs nothing else, even when it is recomputed in the backward pass.
Restrictions that a model passes to flash attention or sdpa as arguments, such as a window, are part of the mask, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_shard.errors import ModelError
from fsdp_shard.models import attention_implementations
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.context_parallel.blockwise import Scoring
from fsdp_shard.sharding.context_parallel.masks import SequenceMask
from fsdp_shard.sharding.context_parallel.ring import ring_attention
from fsdp_shard.sharding.context_parallel.sequence_parts import RING, ULYSSES, WholeSequence
from fsdp_shard.sharding.context_parallel.ulysses import num_sent_heads, repeat_heads, to_heads, to_sequence
from fsdp_shard.sharding.module_shards import transformers_model

_sequence: ContextVar[WholeSequence | None] = ContextVar("sequence", default=None)
_before: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # previous attention of models


def resolve_context_method(shard: ShardConfig, config: PretrainedConfig) -> str:
    """The method of `shard`; `auto` is Ulysses if the heads divide evenly over the ranks, else ring attention."""
    if shard.context_method != "auto":
        return shard.context_method
    heads = num_query_heads(config)
    return ULYSSES if heads is not None and heads % shard.context_parallel == 0 else RING


def num_query_heads(config: PretrainedConfig) -> int | None:
    """Number of query heads of a model, if its config defines it."""
    found = getattr(config.get_text_config(), "num_attention_heads", None)
    return found if isinstance(found, int) else None


def use_context_parallel(model: PreTrainedModel, method: str) -> None:
    """Make `model` attend across the ranks that divide its sequences, with `ulysses` or `ring`."""
    AttentionInterface.register(ULYSSES, _attend_by_heads)
    AttentionInterface.register(RING, _attend_in_ring)
    for name in (ULYSSES, RING):
        AttentionMaskInterface.register(name, _make_mask)
    (before,) = attention_implementations(model)[:1] or ["sdpa"]
    model.set_attn_implementation(method)
    if attention_implementations(model) != [method]:
        raise ModelError(
            f"{type(model).__name__} does not use the attention interface of transformers, so shard.context_parallel "
            f"cannot divide its sequences"
        )
    _before[model] = before


def context_method_of(model: nn.Module) -> str | None:
    """The method with which `model`, or the model that it wraps, attends across ranks; None if it does not."""
    used = attention_implementations(model)
    return next((method for method in (ULYSSES, RING) if method in used), None)


@contextmanager
def attention_over(sequence: WholeSequence | None) -> Iterator[None]:
    """Within the block, forward passes process parts of `sequence`, or whole sequences if it is None."""
    token = _sequence.set(sequence)
    try:
        yield
    finally:
        _sequence.reset(token)


@contextmanager
def without_context_parallel(model: nn.Module) -> Iterator[None]:
    """Within the block, `model`, or the model that it wraps, attends as before `use_context_parallel`, to generate."""
    method, inside = context_method_of(model), transformers_model(model)
    if method is None or inside is None:
        yield
        return
    inside.set_attn_implementation(_before[inside])
    try:
        yield
    finally:
        inside.set_attn_implementation(method)


def _make_mask(
    *,
    mask_function: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **kwargs: Any,
) -> SequenceMask:
    """Create the mask for a kind of layer, from the arguments that transformers passes to `sdpa_mask`.

    Raises:
        ModelError: The model has a custom mask, or is not causal.
    """
    sequence = _sequence.get()
    if sequence is None:
        raise ModelError(
            "A model whose sequences are divided over ranks was called with whole ones; call it within "
            "fsdp_shard.sharding.without_context_parallel(model), or set shard.context_parallel=1."
        )
    if use_vmap or allow_is_bidirectional_skip is not None:
        what = "attends in both directions" if allow_is_bidirectional_skip is not None else "adds to its causal mask"
        raise ModelError(f"the model {what}, which shard.context_parallel cannot divide")
    return SequenceMask(sequence, mask_function, local_size)


def _attend_in_ring(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with ring attention, from [batch, heads, part, width] to [batch, part, heads, width]; a collective."""
    mask = _checked_mask(module, attention_mask, kwargs)
    if dropout:
        raise ModelError(
            f"{type(module).__name__} has dropout in attention ({dropout}), which ring attention does not support."
        )
    how = _make_scoring(query, scaling, kwargs)
    output = ring_attention(query, key, value, mask, how, kwargs.get("s_aux"))
    return output.transpose(1, 2).contiguous(), None  # contiguous as in transformers: some models view it


def _attend_by_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with Ulysses, from [batch, heads, part, width] to [batch, part, heads, width]; a collective.

    sdpa attends to the whole sequence; if the model caps scores or has sinks, blockwise attention does.
    """
    mask = _checked_mask(module, attention_mask, kwargs)
    ranks, num_heads = mask.sequence.ranks, query.shape[1]
    if num_heads % ranks.num_ranks:
        raise ModelError(
            f"{type(module).__name__} has {num_heads} heads, which {ranks.num_ranks} ranks cannot divide; set "
            f"shard.context_method=ring."
        )
    num_sent = num_sent_heads(key.shape[1], ranks.num_ranks)
    query = to_heads(query, ranks)
    key, value = (to_heads(repeat_heads(tensor, num_sent), ranks) for tensor in (key, value))
    sinks = kwargs.get("s_aux")
    if sinks is None and kwargs.get("softcap") is None:
        own = _Heads(query.shape[1] // key.shape[1])
        output, _ = sdpa_attention_forward(own, query, key, value, mask.whole(), dropout, scaling)  # type: ignore[arg-type]  # wider in fact than it is annotated
        output = output.transpose(1, 2)
    elif dropout:
        raise ModelError(f"{type(module).__name__} has dropout in attention ({dropout}) with a cap or sinks.")
    else:
        first = ranks.rank * query.shape[1]
        own_sinks = None if sinks is None else sinks.reshape(-1)[first : first + query.shape[1]]
        output = ring_attention(query, key, value, mask.on_one_rank(), _make_scoring(query, scaling, kwargs), own_sinks)
    return to_sequence(output, ranks).transpose(1, 2).contiguous(), None


class _Heads:
    """A stand-in for the layer in sdpa: how many queries share a key among this rank's heads."""

    is_causal = True

    def __init__(self, num_key_value_groups: int) -> None:
        self.num_key_value_groups = num_key_value_groups


def _checked_mask(module: nn.Module, mask: Any, kwargs: dict[str, Any]) -> SequenceMask:
    """Return `mask`; raise ModelError if it is not ours, or if the layer passes arguments that would be ignored."""
    others = [name for name in ("position_bias", "cache", "output_attentions") if kwargs.get(name) is not None]
    others = [name for name in others if kwargs[name] is not False]
    if not isinstance(mask, SequenceMask) or others or kwargs.get("is_causal") is False:
        given = ", ".join(others) or f"a mask of type {type(mask).__name__}"
        raise ModelError(f"{type(module).__name__} gives its attention {given}, which cannot be divided over ranks.")
    return mask


def _make_scoring(query: torch.Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Scoring:
    return Scoring(query.shape[-1] ** -0.5 if scaling is None else float(scaling), kwargs.get("softcap"))
