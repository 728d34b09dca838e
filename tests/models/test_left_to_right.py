"""Causal language models whose tokens depend on later ones are refused before they are trained or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

import fsdp_shard as fs
from fsdp_shard.checkpoint import locate
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ModelError
from fsdp_shard.models import check_left_to_right
from fsdp_shard.training.finetune_checks import check_model
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.teachers.teacher_checks import check_teacher
from tests.support.tiny import byte_tokenizer, save_model


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


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bart", "bloom", "gemma3_text"])
def test_causal_models_pass_with_their_defaults(family: str) -> None:
    config = AutoConfig.for_model(family)
    config.is_encoder_decoder = False
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    before, state = config.to_dict(), torch.get_rng_state()
    check_left_to_right(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_they_are_refused_wherever_they_would_predict(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = config_of("RobertaForCausalLM", **sizes, vocab_size=257, pad_token_id=1, max_position_embeddings=130)
    transformers.RobertaForCausalLM(config).save_pretrained(tmp_path / "both")
    byte_tokenizer().save_pretrained(tmp_path / "both")
    (tmp_path / "data.txt").write_text("some text\n" * 100)
    data = {"path": str(tmp_path / "data.txt"), "sequence_length": 16}
    words = r"both/config\.json is of a RobertaForCausalLM that attends to later tokens"

    run = fs.FinetuneConfig(data=DataConfig(**data))
    run.model.path = str(tmp_path / "both")
    with pytest.raises(ModelError, match=words):
        check_model(run, locate(run.model.path))

    run.model.path = str(save_model(tmp_path / "student"))
    run.objective = DistillConfig(teacher=str(tmp_path / "both"))
    with pytest.raises(ModelError, match=rf"objective\.teacher=.*{words}"):
        check_teacher(run, locate(run.model.path))

    evaluation = fs.EvaluateConfig(checkpoint=str(tmp_path / "both"), data=DataConfig(**data))
    fs.check_evaluation(evaluation)
    with pytest.raises(ModelError, match=words):
        fs.run_evaluation(evaluation, str(tmp_path / "run"))
