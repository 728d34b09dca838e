"""Experts that are stored one by one are one tensor: the same values as transformers makes, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from fsdp_shard.checkpoint.keys.matching import match_names
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.errors import CheckpointError


@pytest.fixture
def mixtral(tmp_path: Path) -> torch.nn.Module:
    config = MixtralConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=11,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    return model


def test_values_are_those_of_transformers(tmp_path: Path, mixtral: torch.nn.Module) -> None:
    with open_checkpoint(tmp_path) as index:
        names = match_names(mixtral, index).stored  # type: ignore[arg-type]
        for name, parameter in mixtral.named_parameters():
            assert torch.equal(index.read(names[name]), parameter), name
        merged = names["model.layers.0.mlp.experts.gate_up_proj"]
        part = torch.empty(50)
        index.read_into(merged, 70, part.numpy())
        whole = mixtral.get_parameter("model.layers.0.mlp.experts.gate_up_proj").detach().flatten()
        assert torch.equal(part, whole[70:120]), "across the seam of two experts"


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, mixtral: torch.nn.Module, damage: str) -> None:
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.3.w3" in name)
    wrong = tensors.pop(name)
    if damage == "shape":
        tensors[name] = wrong[:5].contiguous()
    save_file(tensors, file, {"format": "pt"})
    words = "lacks some of the experts" if damage == "missing" else r"experts\.3\.w3"
    with open_checkpoint(tmp_path) as index, pytest.raises(CheckpointError, match=words):
        match_names(mixtral, index)  # type: ignore[arg-type]
