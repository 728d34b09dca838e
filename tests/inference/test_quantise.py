"""Quantised weights: what they take, what they predict, and what is said where torchao is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_shard.errors import ConfigError, PlanError
from fsdp_shard.inference.dispatch import load_dispatched
from tests.tiny import token_batch

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
IDS = token_batch(0, rows=2, length=9)


@pytest.mark.skipif(HAS_TORCHAO, reason="speaks of a machine without torchao")
def test_a_missing_torchao_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize=int8 needs torchao.*fsdp-shard\[quantize\]"):
        load_dispatched(tiny_model, quantize="int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, vocab_size=257,
        max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("quantised")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "ratio", "tolerance"), [("int8", 0.52, 0.05), ("int4", 0.33, 0.5)])
def test_layers_are_quantised_and_the_rest_is_not(model: Path, kind: str, ratio: float, tolerance: float) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    layers = sum(param.nbytes for param in plain.model.layers.parameters())
    rest = sum(param.nbytes for param in plain.parameters()) - layers
    fits = rest + int(ratio * layers)
    found = load_dispatched(model, quantize=kind, max_memory={"cpu": fits})
    assert set(found.hf_device_map.values()) == {"cpu"}
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
        difference = (found(input_ids=IDS).logits - expected).abs().max()
    assert 0 < difference < tolerance * expected.abs().max()
    for name, module in found.named_modules():
        if isinstance(module, nn.Linear):
            assert (type(module.weight) is nn.Parameter and type(module.weight.data) is torch.Tensor) == (
                name == "lm_head"
            ), name
    with pytest.raises(PlanError, match=f"quantize={kind} is for models that fit when quantised"):
        load_dispatched(model, "disk", quantize=kind)
