"""Tensors that files name or divide otherwise than the model: the same values as transformers and peft make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from fsdp_shard.checkpoint import convert, verify
from fsdp_shard.checkpoint.keys.matching import match_names
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.keys.peft_adapters import assert_same, by_peft, save


@pytest.fixture
def mixtral(tmp_path: Path) -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=11,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    return model


def test_values_are_those_of_transformers(tmp_path: Path, mixtral: PreTrainedModel) -> None:
    with open_checkpoint(tmp_path) as index:
        names = match_names(mixtral, index).stored
        for name, parameter in mixtral.named_parameters():
            assert torch.equal(index.read(names[name]), parameter), name
        merged = names["model.layers.0.mlp.experts.gate_up_proj"]
        part = torch.empty(50)
        index.read_into(merged, 70, part.numpy())
        whole = mixtral.get_parameter("model.layers.0.mlp.experts.gate_up_proj").detach().flatten()
        assert torch.equal(part, whole[70:120]), "across the seam of two experts"


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, mixtral: PreTrainedModel, damage: str) -> None:
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.3.w3" in name)
    wrong = tensors.pop(name)
    if damage == "shape":
        tensors[name] = wrong[:5].contiguous()
    save_file(tensors, file, {"format": "pt"})
    words = "lacks some of the experts" if damage == "missing" else r"experts\.3\.w3"
    with open_checkpoint(tmp_path) as index, pytest.raises(CheckpointError, match=words):
        match_names(mixtral, index)


def gemma3(directory: Path) -> Path:
    """A model that is stored as `language_model.model...`, and whose module is `model.language_model`."""
    text = {
        "vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    tokens: dict[str, Any] = {"image_token_index": 57, "boi_token_index": 58, "eoi_token_index": 59}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    Gemma3ForConditionalGeneration(config).save_pretrained(directory)
    return directory


def assert_merged_as_by_peft(adapter: Path, base: Path, cls: Any = AutoModelForCausalLM) -> None:
    """What is written has the names of the base's files, and is loaded with the values that peft makes of it."""
    theirs = by_peft(adapter, base, cls)
    assert not convert(adapter, adapter.parent / "target").notes
    assert (
        load_file(adapter.parent / "target" / "model.safetensors").keys()
        == load_file(base / "model.safetensors").keys()
    )
    assert_same(cls.from_pretrained(adapter.parent / "target").state_dict(), theirs)
    before = cls.from_pretrained(base).state_dict()
    assert any(not torch.equal(before[name], theirs[name]) for name in theirs)
    assert verify(adapter).is_sound, verify(adapter).problems


@pytest.mark.parametrize("targets", ["all-linear", r".*language_model.*q_proj"])
def test_an_adapter_of_a_model_that_is_stored_under_other_names(targets: str, tmp_path: Path) -> None:
    base = gemma3(tmp_path / "base")
    save(Gemma3ForConditionalGeneration.from_pretrained(base), {"target_modules": targets}, tmp_path / "adapter")
    assert_merged_as_by_peft(tmp_path / "adapter", base, Gemma3ForConditionalGeneration)


def test_an_embedding_that_is_stored_under_another_name_is_tied_nonetheless(tmp_path: Path) -> None:
    base = gemma3(tmp_path / "base")
    settings = {"target_modules": ["embed_tokens"]}
    save(Gemma3ForConditionalGeneration.from_pretrained(base), settings, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"model\.language_model\.embed_tokens\.weight, which .* ties to another"):
        convert(tmp_path / "adapter", tmp_path / "target")


def test_a_router_that_is_stored_under_another_name(tmp_path: Path, mixtral: PreTrainedModel) -> None:
    """Files of Mixtral have `block_sparse_moe.gate`, and its module is `mlp.gate`."""
    mixtral.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings, tmp_path / "adapter")
    assert_merged_as_by_peft(tmp_path / "adapter", tmp_path / "base")


def test_a_router_with_a_table_of_integers(tmp_path: Path) -> None:
    """DeepSeek-V4's router has one from tokens to experts, which peft saves with the router's weights."""
    config = DeepseekV4Config(
        vocab_size=31,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        layer_types=["heavily_compressed_attention"],
        mlp_layer_types=["hash_moe"],
        num_attention_heads=2,
        head_dim=8,
        q_lora_rank=8,
        n_routed_experts=3,
        num_experts_per_tok=2,
        o_groups=1,
        o_lora_rank=8,
        hc_mult=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["q_a_proj"], "modules_to_save": ["gate"]}
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings, tmp_path / "adapter")
    assert verify(tmp_path / "adapter").is_sound
    assert_merged_as_by_peft(tmp_path / "adapter", tmp_path / "base")


SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
# config, peft's settings
STACKED: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=3), {"target_modules": "all-linear"}),
    "qwen3_moe": (
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2),
        {"target_modules": "all-linear", "use_rslora": True},
    ),
    "one of two parameters": (
        MixtralConfig(**SIZES, num_local_experts=3),
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.down_proj"],
            "rank_pattern": {r".*0\.mlp\.experts\.down_proj": 3},
            "alpha_pattern": {"down_proj": 5},
        },
    ),
    "no modules": (MixtralConfig(**SIZES, num_local_experts=3), {"target_parameters": ["gate_up_proj"]}),
    "stored as stacks, transposed": (
        GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("name", STACKED)
def test_adapters_of_experts_are_merged_as_by_peft(name: str, tmp_path: Path) -> None:
    config, settings = STACKED[name]
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    save(AutoModelForCausalLM.from_pretrained(base), settings, tmp_path / "adapter")
    assert any("experts" in stored for stored in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert_merged_as_by_peft(tmp_path / "adapter", base)


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    config, settings = STACKED["no modules"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings, tmp_path / "adapter")
    AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4)).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"gate_up_proj have the ranks 6 and 6, but .* give it 8"):
        convert(tmp_path / "adapter", tmp_path / "target", base=tmp_path / "other")
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="target_parameters needs the base model's class, which cannot be built"):
        convert(tmp_path / "adapter", tmp_path / "target")
