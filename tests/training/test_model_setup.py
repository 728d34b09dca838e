"""What is found wrong with a model and its settings before any rank starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MarianConfig,
    MBartConfig,
    MixtralConfig,
    PretrainedConfig,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)

from fsdp_shard.checkpoint import CheckpointConfig, locate
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import LaunchConfig, init_distributed
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import SEQ2SEQ, ModelConfig
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config, ShardConfig
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.finetune_checks import check_combination, check_model
from fsdp_shard.training.load_model import load_sharded, match_weights
from fsdp_shard.training.model_origin import (
    check_classifier,
    collect_model_files,
    data_task,
    layer_drop_notes,
    model_on_meta,
    origin_config,
)
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.lora import inject_lora
from fsdp_shard.utils import check
from tests.support.tiny import byte_tokenizer

GOOD = FinetuneConfig(model=ModelConfig(path="x"), data=DataConfig(path="y"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"launch": LaunchConfig(max_restarts=1), "checkpoint": CheckpointConfig(optimizer=False)},
            r"launch\.max_restarts=1 resumes from .*checkpoint\.optimizer=false",
        ),
        (
            {"launch": LaunchConfig(nodes="1:2", rendezvous="a:1"), "checkpoint": CheckpointConfig(optimizer=False)},
            r"launch\.nodes=1:2 resumes from the last checkpoint",
        ),
        (
            {"adapter": LoraConfig(), "checkpoint": CheckpointConfig(layout="gathered", max_shard_size="1GB")},
            r"checkpoint\.max_shard_size=1GB has no effect with an adapter",
        ),
        ({"data": DataConfig(path="y", eval_split="test")}, r"data\.eval_split=test is for data\.eval_path"),
    ],
)
def test_settings_of_several_sections(changes: dict[str, Any], words: str) -> None:
    check(GOOD)
    with pytest.raises(ConfigError, match=words):
        check(replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "model": ModelConfig(path="x", attention="flash_attention_2"),
                "data": DataConfig(path="y", packing=True),
                "train": TrainConfig(micro_batch_size=2),
            },
            r"data\.packing=true with model\.attention=flash_attention_2 needs train\.micro_batch_size=1",
        ),
        (
            {"data": DataConfig(path="y", streaming=True), "train": TrainConfig(epochs=0.5)},
            r"train\.epochs=0\.5 cannot be combined with data\.streaming=true, because the length of a stream is not "
            r"known before its end; set train\.steps instead\.",
        ),
        (
            {"model": ModelConfig(path="x", task="masked_lm"), "train": TrainConfig(sample_prompts=["hi"])},
            r"train\.sample_prompts is for model\.task=causal_lm, not masked_lm; remove it\.",
        ),
    ],
)
def test_settings_of_several_sections_that_a_plan_has_too(changes: dict[str, Any], words: str) -> None:
    config = replace(GOOD, **changes)
    check(config)
    with pytest.raises(ConfigError, match=words):
        check_combination(config, 1, on_gpu=False, is_packed=config.data.packing, is_streamed=config.data.streaming)


SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
LLAMA = LlamaConfig(**SIZES, intermediate_size=8, max_position_embeddings=16, pad_token_id=None)


def save(directory: Path, config: PretrainedConfig, kind: Any = AutoModelForCausalLM) -> ModelConfig:
    kind.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return ModelConfig(path=str(directory), dtype="float32")


def look(
    model: ModelConfig,
    shard: ShardConfig | None = None,
    adapter: AdapterConfig | None = None,
    **data: Any,
) -> None:
    text = DataConfig(**{"path": "y", "sequence_length": 16, **data})
    shard = shard or Fsdp2Config(param_dtype="float32")
    config = FinetuneConfig(model=model, shard=shard, data=text, adapter=adapter or AdapterConfig())
    check_model(config, locate(model.path))


def test_what_would_fail_in_the_first_step(tmp_path: Path) -> None:
    llama = save(tmp_path / "llama", LLAMA)
    look(llama, sequence_length=4096)
    with pytest.raises(ConfigError, match=r"float16 is too narrow to train in"):
        look(replace(llama, dtype="float16"))
    look(replace(llama, dtype="float16"), adapter=LoraConfig())
    narrow = replace(llama, dtype="bfloat16")
    look(narrow, adapter=LoraConfig())
    for shard in (Fsdp1Config(), DdpConfig(param_dtype="bfloat16", reduce_dtype="bfloat16")):
        look(narrow, shard)
        with pytest.raises(ConfigError, match=r"parameters.* bfloat16 and float32; set"):
            look(narrow, shard, LoraConfig())
    with pytest.raises(ConfigError, match=r"bfloat16 and float32; set model\.dtype=float32\."):
        look(narrow, adapter=LoraConfig(modules_to_save=["input_layernorm"]))
    short = save(tmp_path / "gpt2", GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=64, vocab_size=300))
    look(short, sequence_length=64)
    with pytest.raises(ConfigError, match=r"data\.sequence_length=65 exceeds the model's context of 64 tokens"):
        look(short, sequence_length=65)
    with pytest.raises(ConfigError, match=r"data\.target_length=65 exceeds the model's context of 64 tokens"):
        look(short, target_length=65)


def test_adapted_experts_are_not_flattened(tmp_path: Path) -> None:
    mixtral = save(tmp_path, MixtralConfig(**SIZES, intermediate_size=8, num_local_experts=2, num_key_value_heads=1))
    look(mixtral, adapter=LoraConfig())
    look(mixtral, Fsdp1Config(param_dtype="float32"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"shard=fsdp1 cannot shard .*mlp.* of Mixtral.*LoRA of single param"):
        look(mixtral, Fsdp1Config(param_dtype="float32"), LoraConfig())


def test_targets_begin_as_the_model_says(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 300}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    part = T5GemmaModuleConfig(**SIZES, intermediate_size=8, num_key_value_heads=1, head_dim=4, bos_token_id=5)
    made = {
        "bart": BartConfig(**sizes, decoder_start_token_id=7),
        "mbart": MBartConfig(**sizes, decoder_start_token_id=9),
        "t5gemma": T5GemmaConfig(encoder=part, decoder=part, vocab_size=300),
    }
    starts = {}
    for name, config in made.items():
        model = replace(save(tmp_path / name, config, AutoModelForSeq2SeqLM), task="seq2seq")
        starts[name] = data_task(model, locate(model.path)).decoder_start
    assert starts == {"bart": 7, "mbart": 9, "t5gemma": 5}
    part.bos_token_id = None
    for name, config, words in (
        ("open", MBartConfig(**sizes), "MBartForConditionalGeneration has no decoder_start_token_id"),
        ("none", T5GemmaConfig(encoder=part, decoder=part, vocab_size=300), "bos_token_id has to be defined"),
    ):
        model = save(tmp_path / name, config, AutoModelForSeq2SeqLM)
        with pytest.raises(ModelError, match=words):
            look(replace(model, task="seq2seq"))


def test_layers_that_are_not_dropped_are_reported(tmp_path: Path) -> None:
    model = save(tmp_path / "llama", LLAMA)
    assert layer_drop_notes(model, locate(model.path)) == []
    sizes: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 300}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = save(tmp_path / "bart", BartConfig(**sizes, encoder_layerdrop=0.25), AutoModelForSeq2SeqLM)
    (line,) = layer_drop_notes(model, locate(model.path))
    assert line.startswith("config.json has encoder_layerdrop=0.25, which is not applied")


def test_the_data_knows_how_many_tokens_the_model_embeds(tmp_path: Path) -> None:
    model = save(tmp_path / "llama", LlamaConfig(**{**SIZES, "vocab_size": 123}, intermediate_size=8))
    assert data_task(model, locate(model.path)).vocabulary == 123


def test_a_classifier_that_reads_padding_is_rejected() -> None:
    # GPT-2's classifier does not use its summary_type.
    check_classifier(AutoConfig.for_model("gpt2", num_labels=2, pad_token_id=0))
    with pytest.raises(ModelError, match=r"xlnet with summary_type=last .* reads the padding"):
        check_classifier(AutoConfig.for_model("xlnet", num_labels=2, pad_token_id=0))


def test_classifiers_say_what_they_take_for_padding(tmp_path: Path) -> None:
    made = []
    kinds: dict[str, dict[str, Any]] = {
        "good": {"pad_token_id": 256},
        "none": {},
        "one": {"pad_token_id": 2, "num_labels": 1},
    }
    for name, values in kinds.items():
        config = LlamaConfig(**SIZES, intermediate_size=8, **values)
        model = save(tmp_path / name, config, AutoModelForSequenceClassification)
        made.append(replace(model, task="sequence_classification"))
    good, none, one = made
    look(good)
    assert data_task(good, locate(good.path)).padding == 256
    with pytest.raises(ModelError, match=r"no pad_token_id in its config\.json"):
        look(none)
    with pytest.raises(ModelError, match=r"num_labels=1 in its config\.json"):
        look(one)


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_a_pooler_that_masked_models_lack_is_part_of_a_new_head(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SIZES, intermediate_size=8, embedding_size=8)
    saved = save(tmp_path / "masked", config, AutoModelForMaskedLM)
    model = replace(saved, task="sequence_classification", labels=["bad", "good"])
    source = locate(model.path)
    classifier = model_on_meta(model, source)
    with source.model_index as index:
        head, matched = match_weights(classifier, model, index, head_is_read=False)
    assert head is not None
    assert [name.split(".")[:2] for name in head.pooler] == [[kind, "pooler"]] * 2
    assert {*head.tensors} == {*head.pooler, "classifier.weight", "classifier.bias"}
    assert {*head.tensors} <= {*matched.stored.values()}
    look(model)
    with pytest.raises(ConfigError, match=r"has no bert\.pooler.*|has no albert\.pooler.*; give adapter=none"):
        look(model, adapter=LoraConfig())
    whole = save(tmp_path / "whole", config, AutoModelForSequenceClassification)
    look(replace(model, path=whole.path), adapter=LoraConfig())


def test_a_classifier_of_several_classes_a_text_needs_a_new_head(tmp_path: Path) -> None:
    """transformers takes the sigmoid of its scores, and `finetune` trains their softmax."""
    config = LlamaConfig(**SIZES, intermediate_size=8, pad_token_id=2, problem_type="multi_label_classification")
    saved = save(tmp_path / "model", config, AutoModelForSequenceClassification)
    model = replace(saved, task="sequence_classification")
    source = locate(model.path)
    with pytest.raises(ModelError, match="problem_type=multi_label_classification in its config"):
        check_classifier(origin_config(model, source))
    relabeled = replace(model, labels=["bad", "good"])
    check_classifier(origin_config(relabeled, source))
    files = collect_model_files(source, relabeled, DataConfig(path="x"))
    assert json.loads(files["config.json"]).get("problem_type") is None


def test_an_outdated_quantization_does_not_label_trained_weights(tmp_path: Path) -> None:
    """On a GPU, transformers would take the plain weights of a saved step for fp8 without scales."""
    config = LlamaConfig(**SIZES, intermediate_size=8)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    saved = save(tmp_path / "model", config, AutoModelForCausalLM)
    files = collect_model_files(locate(saved.path), saved, DataConfig(path="x"))
    assert "quantization_config" in json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in json.loads(files["config.json"])


@pytest.mark.parametrize(
    ("kind", "task", "expected"),
    [
        (AutoModelForCausalLM, "causal_lm", "CAUSAL_LM"),
        (AutoModelForSequenceClassification, "sequence_classification", "SEQ_CLS"),
        (AutoModelForSeq2SeqLM, "seq2seq", "SEQ_2_SEQ_LM"),
        (AutoModelForMaskedLM, "masked_lm", None),
    ],
)
def test_adapters_are_saved_for_pefts_class_of_the_task(kind: Any, task: str, expected: str | None) -> None:
    config: PretrainedConfig = LlamaConfig(**SIZES, intermediate_size=8)
    if task == "seq2seq":
        config = BartConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=9
        )
    if task == "masked_lm":
        config = BertConfig(**SIZES, intermediate_size=8)
    with torch.device("meta"):
        model = kind.from_config(config)
    adapter, _ = inject_lora(model, LoraConfig(), "base", {}, task)
    assert json.loads(adapter.files()["adapter_config.json"])["task_type"] == expected
    assert not any("modules_to_save" in name for name, _ in model.named_parameters())


def test_values_that_transformers_computes_are_not_kept(tmp_path: Path) -> None:
    """Marian's positions are not stored; whole on each rank, they would take memory until the end of the run."""
    sizes: dict[str, Any] = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(vocab_size=31, pad_token_id=30, decoder_start_token_id=30, **sizes, **heads)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    source = locate(tmp_path)
    stored = set(source.model_index.tensors)
    settings = ModelConfig(path=str(tmp_path), task=SEQ2SEQ)
    with init_distributed("cpu") as context:
        loaded = load_sharded(settings, Fsdp2Config(param_dtype="float32"), source, context)
        positions: Any = loaded.model.module.get_parameter("model.encoder.embed_positions.weight")  # a DTensor
        assert positions.full_tensor().any()
    assert set(source.model_index.tensors) == stored
