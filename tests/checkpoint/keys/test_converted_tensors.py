"""Stored forms that transformers converts by more than stacking experts have the values that it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from tests.checkpoint.keys.matched_values import check_matched_values

SIZES = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32,
    "intermediate_size": 48, "vocab_size": 67, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16}
LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
FORMS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**EXPERTS, "num_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {**EXPERTS, "n_routed_experts": 4, "q_lora_rank": 16, "o_lora_rank": 16},
    "gte": {},
    "hrm_text": {},
    "jina_embeddings_v3": {},
    "nomic_bert": {},
    "olmo_hybrid": {f"linear_{name}": size for name, size in LINEAR.items()},
}


def write(kind: str, directory: Path) -> PreTrainedModel:
    """A random model as transformers writes it; returns what it loads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **FORMS[kind])
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model = (AutoModelForCausalLM if is_causal else AutoModel).from_config(config)
    model.save_pretrained(directory)
    assert load_file(directory / "model.safetensors").keys() - model.state_dict().keys(), "stored in another form"
    loaded: PreTrainedModel = type(model).from_pretrained(directory)
    return loaded


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind in CONFIG_MAPPING])  # others are newer
def test_values_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    assert check_matched_values(tmp_path, write(kind, tmp_path)) == ""


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_they_run_wherever_their_blocks_are(device_map: str, tmp_path: Path) -> None:
    expected, tokens = write("hrm_text", tmp_path).eval(), torch.tensor([[3, 5, 7]])
    with torch.inference_mode():
        logits = load_dispatched(tmp_path, device_map=device_map)(tokens).logits
        assert torch.equal(logits, expected(tokens).logits)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_parts_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    write("olmo_hybrid", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_conv1d.weight"))
    wrong = tensors.pop(name)
    if damage == "shape":
        tensors[name] = wrong[..., :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    words = r"conv1d\.weight \[\d+, 1, 4\] instead of" if damage == "missing" else r"which fails: .* incomplete, or of"
    with pytest.raises(CheckpointError, match=words):
        load_dispatched(tmp_path)
