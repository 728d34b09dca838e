"""Checks that a model's sequences can be divided over ranks, by its settings and by running a tiny model in parts."""

import inspect
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import CAUSAL, ModelConfig, attention_implementations, frequency_limit, try_tiny_model
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.context_parallel.attention import (
    attention_over,
    num_query_heads,
    resolve_context_method,
    use_context_parallel,
)
from fsdp_shard.sharding.context_parallel.sequence_parts import RING, ULYSSES, ContextRanks

_LENGTH, _VOCABULARY = 16, 90
_MIXED = ContextRanks(((2, 0, 3, 1),))  # one rank with all chunks, in another order
_ROUNDING = 1e-3  # relative to the largest logit: experts multiply tokens in another order
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def check_context_parallel(
    config: PretrainedConfig, model: PreTrainedModel, settings: ModelConfig, shard: ShardConfig, sequence_length: int
) -> None:
    """Check that `shard.context_parallel` can divide the sequences of a model; does nothing if it is 1.

    Args:
        config: The model's config.
        model: The model, on meta.
        settings: The `model.*` settings.
        shard: The `shard.*` settings.
        sequence_length: The longest sequence, in tokens.

    Raises:
        ConfigError: Another setting does not allow it, sequences are too short, or heads cannot be divided.
        ModelError: The model mixes tokens by means other than transformers' attention interface.
    """
    ranks = shard.context_parallel
    if ranks == 1:
        return
    given = f"shard.context_parallel={ranks}"
    if settings.task != CAUSAL:
        raise ConfigError(f"{given} is for model.task={CAUSAL}, not {settings.task}; remove it.")
    if settings.attention != "auto":
        raise ConfigError(
            f"model.attention={settings.attention} cannot be combined with {given}, which has an attention of its "
            f"own; remove it, and choose with shard.context_method."
        )
    if sequence_length < 2 * ranks:
        raise ConfigError(
            f"{given} cuts each sequence into {2 * ranks} parts, but data.sequence_length={sequence_length} is "
            f"shorter; use fewer ranks, or longer sequences."
        )
    method = resolve_context_method(shard, config)
    _check_method(model, shard, method, given)
    _check_positions(config, given, sequence_length)
    _check_model(config, type(model), given)


def _check_method(model: PreTrainedModel, shard: ShardConfig, method: str, given: str) -> None:
    """Raise ConfigError for heads that cannot be divided, and for features that a method's attention lacks."""
    text, heads = model.config.get_text_config(), num_query_heads(model.config)
    divides = heads is not None and heads % shard.context_parallel == 0
    if method == ULYSSES and not divides:
        raise ConfigError(
            f"shard.context_method=ulysses with {given} does not divide the {heads} num_attention_heads of "
            f"{type(model).__name__}; use a divisor, or shard.context_method=ring."
        )
    if method == ULYSSES and attention_implementations(model) == ["sdpa"]:
        return  # torch's kernels compute it
    dropouts = [name for name in _DROPOUTS if getattr(text, name, 0)]
    if dropouts:
        raise ConfigError(
            f"shard.context_method={method} with {given} does not support dropout in attention, but "
            f"config.json of {type(model).__name__} has {dropouts[0]}={getattr(text, dropouts[0])}; set that to 0"
            f"{', or use shard.context_method=ulysses' if method == RING and divides else ''}."
        )
    if shard.activation_checkpointing == "selective":
        raise ConfigError(
            f"shard.activation_checkpointing=selective cannot be combined with shard.context_method={method} for "
            f"{type(model).__name__}, as it would keep all scores; set it to true."
        )


def _check_positions(config: PretrainedConfig, given: str, sequence_length: int) -> None:
    """Raise ConfigError for rotary frequencies that depend on the last position that a rank sees."""
    limit = frequency_limit(config)
    if limit is not None and sequence_length > limit:
        raise ConfigError(
            f"{given} cannot be combined with data.sequence_length={sequence_length}: the rotary frequencies of this "
            f"model change beyond {limit} tokens, and each rank sees other positions; set at most "
            f"data.sequence_length={limit}."
        )


def _check_model(config: PretrainedConfig, cls: type[PreTrainedModel], given: str) -> None:
    """Raise ModelError unless a tiny model of this architecture has the same logits with its tokens reordered."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if not cls.__module__.startswith("transformers."):
        reason = "its code is not part of transformers"
    elif config.is_encoder_decoder:
        reason = "it is an encoder-decoder model"
    elif others:
        reason = f"it has layers without attention ({', '.join(others)})"
    elif getattr(config.get_text_config(), "attn_temperature_tuning", False):  # takes effect beyond thousands of tokens
        reason = "its layers count token positions themselves (attn_temperature_tuning)"
    elif "position_ids" not in inspect.signature(cls.forward).parameters:
        reason = "it takes no position_ids"
    else:
        failure = "with tokens in another order its logits differ, so it mixes them by more than attention over a mask"
        reason = try_tiny_model(config, None, _is_same_in_parts, failure)
    if reason:
        raise ModelError(
            f"{given} cannot divide the sequences of {cls.__name__}: {reason}. Set shard.context_parallel=1."
        )


def _is_same_in_parts(model: PreTrainedModel) -> bool:
    """Whether ring attention on one rank, with tokens in another order, gives the logits of the whole window."""
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(5, _VOCABULARY, (1, _LENGTH), generator=generator)
    run: Any = partial(model, use_cache=False)
    with torch.no_grad():
        whole = run(input_ids=window).logits
        use_context_parallel(model, RING)
        part = _MIXED.own_part({"input_ids": window.numpy()}, window.numpy(), ignore_index=-100)
        with attention_over(part.sequence):
            mixed = run(**{name: torch.from_numpy(array) for name, array in part.inputs.items()}).logits
    expected = whole[:, _MIXED.own_tokens(_LENGTH)]
    return float((mixed - expected).abs().max()) <= _ROUNDING * float(expected.abs().max())
