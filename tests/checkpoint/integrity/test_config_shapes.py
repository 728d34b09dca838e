"""Configs against shapes: real models of transformers, built on meta, sound and with one number changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from fsdp_shard.checkpoint.integrity.config_shapes import config_problems

# What makes a model small, and has no number twice that a rule could mix up.
_LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 24}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 2}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 97, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_heads": 4}),
    "bert": (
        "BertForMaskedLM",
        {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
        },
    ),
    "gemma3_text": ("Gemma3ForCausalLM", {**_LLAMA, "head_dim": 24}),
    "opt": ("OPTForCausalLM", {"vocab_size": 97, "hidden_size": 48, "word_embed_proj_dim": 24, "ffn_dim": 80}),
    "rembert": ("RemBertForMaskedLM", {}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_inner": 80}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 3, "n_routed_experts": 8}),
    "jamba": ("JambaForCausalLM", {"num_hidden_layers": 8}),
    "swin": ("SwinModel", {}),
    "mimi": ("MimiModel", {}),
    "bart": ("BartForConditionalGeneration", {"encoder_layers": 2, "decoder_layers": 3}),
}


def model(kind: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(config.json, shapes) of a model."""
    name, values = _MODELS[kind]
    config = transformers.CONFIG_MAPPING[kind](**values)
    with torch.device("meta"):
        built = getattr(transformers, name)._from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    return json.loads(built.config.to_json_string()), shapes


@pytest.mark.parametrize("kind", list(_MODELS))
def test_of_a_sound_model_nothing_is_said(kind: str) -> None:
    assert config_problems(*model(kind)) == []


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("llama", key) for key in _LLAMA),
        ("qwen3", "head_dim"),
        ("qwen3", "num_key_value_heads"),
        ("mixtral", "num_hidden_layers"),
        *(("gpt2", key) for key in ("vocab_size", "n_embd", "n_layer")),
        *(("t5", key) for key in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads")),
        *(("bert", key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")),
        *(("gemma3_text", key) for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_wrong_number_is_named(kind: str, key: str, factor: float) -> None:
    config, shapes = model(kind)
    config[key] = int(config[key] * factor)
    problems = config_problems(config, shapes)
    assert any(f"{key}={config[key]}" in problem for problem in problems), problems


def test_a_missing_layer_is_named() -> None:
    config, shapes = model("llama")
    left = {name: shape for name, shape in shapes.items() if ".1." not in name}
    assert config_problems(config, left) == [
        "num_hidden_layers=3, but model.layers has 2 layers, and model.layers.1 is not among them."
    ]


def test_a_missing_head_is_named() -> None:
    config, shapes = model("llama")
    left = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    assert config_problems({**config, "architectures": ["LlamaForCausalLM"]}, left) == [
        "tie_word_embeddings=false gives a LlamaForCausalLM a head besides model.embed_tokens.weight, which is "
        "[97, 48], but no other tensor has as many rows."
    ]
    assert config_problems({**config, "architectures": ["LlamaModel"]}, left) == []
    assert config_problems({**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, left) == []


def test_the_text_part_of_a_model_of_several_parts() -> None:
    config, shapes = model("llama")
    composed = {"model_type": "llava", "text_config": config, "vision_config": {"model_type": "clip_vision_model"}}
    named = {name.replace("model.", "language_model.model."): shape for name, shape in shapes.items()}
    named["vision_tower.layers.0.self_attn.q_proj.weight"] = (5, 5)
    assert config_problems(composed, named) == []
    config["hidden_size"] = 50
    assert config_problems(composed, named)
    assert config_problems({"encoder": config, "model_type": "encoder-decoder"}, named) == []


def test_what_is_built_otherwise_is_passed_over() -> None:
    config, shapes = model("llama")
    config["vocab_size"] = 50
    assert config_problems(config, shapes)
    assert config_problems({**config, "auto_map": {"AutoModel": "own.Model"}}, shapes) == []
    assert config_problems({**config, "quantization_config": {"bits": 4}}, shapes) == []
    assert config_problems({}, shapes) == []
    assert config_problems({**config, "vocab_size": "many", "hidden_size": None, "num_hidden_layers": []}, shapes) == []
