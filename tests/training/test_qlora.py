"""Which layers of a model under an adapter are quantized, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import QuantizedLinear, build_on_meta, weights_per_parameter
from fsdp_shard.sharding import Fsdp1Config, Fsdp2Config, plan_units
from fsdp_shard.training.peft.config import LoraConfig
from fsdp_shard.training.peft.lora import inject_lora
from fsdp_shard.training.peft.qlora import quantize_base
from tests.support.tiny import llama_config


def quantized(config: Any = None, **settings: Any) -> tuple[nn.Module, dict[str, str], Any]:
    """A model on meta with an adapter and a quantized base, what fills what was left, and the base."""
    model = build_on_meta(config or llama_config(tied=False), "float32")
    adapter = LoraConfig(quantize="nf4", **settings)
    _, names = inject_lora(model, adapter, "x", {name: f"stored.{name}" for name in model.state_dict()})
    base, left = quantize_base(model, adapter.quantize, Fsdp2Config(), names)
    return model, left, base


def test_all_linear_layers_of_the_blocks_are_and_nothing_else() -> None:
    model, left, base = quantized(target_modules=["q_proj"])
    found = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(found) == 14
    assert "model.layers.0.self_attn.q_proj.base_layer" in found  # with an adapter
    assert "model.layers.1.mlp.down_proj" in found  # without
    assert base.names["model.layers.1.mlp.down_proj.quantized.rows"] == "stored.model.layers.1.mlp.down_proj.weight"
    assert not any(name.startswith(("lm_head", "model.embed")) for name in base.names)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < set(left)
    assert not set(left) & {f"{name}.weight" for name in found}
    counted = weights_per_parameter(model)
    assert counted["model.layers.1.mlp.down_proj.quantized.rows"] == 36 * 85
    assert base.num_weights == 2 * (2 * 36 * 36 + 2 * 12 * 36 + 3 * 36 * 85)


def test_what_is_trained_whole_stays_whole() -> None:
    model, left, base = quantized(modules_to_save=["gate_proj", "lm_head"])
    assert len(base.names) == 12
    assert not any("gate_proj" in name for name in base.names)
    assert (
        left["model.layers.0.mlp.gate_proj.modules_to_save.default.weight"]
        == "stored.model.layers.0.mlp.gate_proj.weight"
    )
    assert model.get_parameter("model.layers.0.mlp.gate_proj.modules_to_save.default.weight").requires_grad


def test_only_fsdp1_gathers_them_apart() -> None:
    """And fsdp2 before torch 2.13."""
    model, _, _ = quantized()
    is_apart = any(unit.is_quantized for unit in plan_units(model, Fsdp2Config()))
    assert is_apart == (Fsdp2Config.quantized_dtype != "uint8")
    apart = [unit for unit in plan_units(model, Fsdp1Config()) if unit.is_quantized]
    assert [unit.cls for unit in apart] == ["QuantizedWeight"] * 14
    assert {unit.dtype for unit in apart} == {"float32"}


def test_what_cannot_be_is_refused() -> None:
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match=r"adapter.quantize=nf4 has no effect: the blocks of GPT2LMHeadModel"):
        quantized(gpt2)
    model = build_on_meta(llama_config(), "float32")
    with pytest.raises(ConfigError, match=r"adapter.quantize=int8 cannot be combined .*shard.tensor_parallel=2"):
        quantize_base(model, "int8", Fsdp2Config(tensor_parallel=2), {})
    with pytest.raises(ConfigError, match=r"adapter.quantize=int8 cannot be combined .*shard.compile=true under"):
        quantize_base(model, "int8", Fsdp1Config(compile=True), {})
