"""How many positions a model knows, and what a length beyond them means."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from fsdp_shard.data import DataConfig, all_sources
from fsdp_shard.errors import ConfigError
from fsdp_shard.models.context_length import ContextLength, context_length_of, settle_length

SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
TABLE = ContextLength(64, is_table=True)


def llama(**values: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "intermediate_size": 8, "max_position_embeddings": 64, **values})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=64), TABLE),
        (GPTJConfig(n_embd=16, n_layer=1, n_head=2, n_positions=64, rotary_dim=4), TABLE),
        (BertConfig(**SIZES, intermediate_size=8, max_position_embeddings=64), TABLE),
        (RobertaConfig(**SIZES, intermediate_size=8, max_position_embeddings=66, pad_token_id=1), TABLE),
        (OPTConfig(**SIZES, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=64), TABLE),
        (BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=64, vocab_size=9), TABLE),
        (llama(), ContextLength(64)),
        (T5Config(), ContextLength(None)),
        (BloomConfig(), ContextLength(None)),
        (XLNetConfig(), ContextLength(None)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_contexts(config: PretrainedConfig, expected: ContextLength) -> None:
    assert context_length_of(config) == expected


@pytest.mark.parametrize(
    ("rope", "stated", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, 128),
        ({"rope_type": "linear", "factor": 8.0}, 512, 512),
        ({"rope_type": "default"}, 64, 64),
    ],
)
def test_rope_scaling_counts(rope: dict[str, Any], stated: int, expected: int) -> None:
    found = context_length_of(llama(max_position_embeddings=stated, rope_parameters=rope))
    changes = stated if rope["rope_type"] == "dynamic" else None
    assert found == ContextLength(expected, frequency_limit=changes)


def test_frequencies_that_depend_on_the_batch_are_said() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    context = context_length_of(llama(max_position_embeddings=64, rope_parameters=rope))
    assert context.describe(64) == "data.sequence_length=64 of a context of 128 tokens"
    assert context.describe(65).startswith(
        "warning: data.sequence_length=65 of a context of 128 tokens; in a batch with"
    )


def test_rope_scaling_of_some_layers_counts() -> None:
    config = Gemma3TextConfig(max_position_embeddings=64)
    assert config.rope_parameters is not None
    config.rope_parameters["full_attention"] |= {"factor": 4.0, "original_max_position_embeddings": 64}
    assert context_length_of(config) == ContextLength(256)


@pytest.mark.parametrize(("context", "expected"), [(64, 64), (2048, 2048), (131072, 2048), (None, 2048)])
def test_the_default_is_the_context_up_to_2048(context: int | None, expected: int) -> None:
    data = DataConfig(path="x")
    with pytest.raises(ConfigError, match=r"data\.sequence_length is not set"):
        _ = data.window_length
    assert settle_length(data, ContextLength(context)) == data.sequence_length == data.window_length == expected


def test_the_sources_of_a_mixture_have_the_same_length() -> None:
    data = DataConfig(path="", mixture={"a": {"path": "x"}, "b": {"path": "y"}})
    settle_length(data, ContextLength(64))
    assert [source.window_length for source in all_sources(data)] == [64, 64]


def test_what_is_given_is_kept_and_compared() -> None:
    data = DataConfig(path="x", sequence_length=65)
    assert settle_length(data, ContextLength(64)) == settle_length(data, ContextLength(None)) == 65
    assert settle_length(DataConfig(path="x", sequence_length=64), TABLE) == 64
    with pytest.raises(
        ConfigError, match=r"^data\.sequence_length=65 exceeds the model's context of 64 tokens.* set at"
    ):
        settle_length(data, TABLE)
    assert ContextLength(64).describe(64) == "data.sequence_length=64 of a context of 64 tokens"
    assert "warning: data.sequence_length=65 exceeds" in ContextLength(64).describe(65)
    assert "without limit" in ContextLength(None).describe(9_999)
