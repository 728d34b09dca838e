"""Causal language models whose tokens depend on later ones are refused before they are trained or measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from fsdp_shard.errors import ModelError
from fsdp_shard.models import check_left_to_right
from tests.support.tiny import causal_class


def config_of(cls: str, **values: Any) -> Any:
    config = getattr(transformers, cls).config_class(**values)
    config.architectures = [cls]
    return config


@pytest.mark.parametrize(
    ("cls", "key", "value", "words"),
    [
        ("BertLMHeadModel", "is_decoder", True, '"is_decoder": true'),
        ("RobertaForCausalLM", "is_decoder", True, '"is_decoder": true'),
        ("ElectraForCausalLM", "is_decoder", True, '"is_decoder": true'),
        ("XLMWithLMHeadModel", "causal", True, '"causal": true'),
        ("FlaubertWithLMHeadModel", "causal", True, '"causal": true'),
        ("XLNetLMHeadModel", "attn_type", "uni", '"attn_type": "uni"'),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", False, '"use_bidirectional_attention": false'),
    ],
)
def test_models_that_attend_to_later_tokens_are_refused(cls: str, key: str, value: Any, words: str) -> None:
    given = {"use_bidirectional_attention": True} if cls.startswith("Gemma") else {}
    with pytest.raises(ModelError, match=rf"is of a {cls} that attends to later tokens.*Set {words} there"):
        check_left_to_right(config_of(cls, **given))
    check_left_to_right(config_of(cls, **{key: value}))


def test_the_vocabulary_may_be_small() -> None:
    """Letters, or bases of DNA."""
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 16}
    config = config_of("BertLMHeadModel", vocab_size=31, max_position_embeddings=32, **sizes)
    with pytest.raises(ModelError, match="attends to later tokens"):
        check_left_to_right(config)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bart", "bloom", "gemma3_text"])
def test_causal_models_pass_with_their_defaults(family: str) -> None:
    config = AutoConfig.for_model(family)
    config.is_encoder_decoder = False
    config.architectures = [causal_class(config)]
    before, state = config.to_dict(), torch.get_rng_state()
    check_left_to_right(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
