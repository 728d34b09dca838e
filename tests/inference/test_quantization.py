"""Quantized weights: what they take, what they predict, and what is said where torchao is missing."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from fsdp_shard.errors import ConfigError, ModelError, PlanError
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import load_dispatched, plan_dispatch
from fsdp_shard.inference.int4 import Int4, check_gpu
from fsdp_shard.inference.int8 import Int8
from fsdp_shard.inference.quantization import describe, quantized_layers
from fsdp_shard.models import build_on_meta, no_split_blocks
from tests.support.tiny import token_batch

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
IDS = token_batch(0, rows=2, length=9)


@pytest.mark.skipif(HAS_TORCHAO, reason="speaks of a machine without torchao")
def test_a_missing_torchao_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize=int8 needs torchao.*\[quantize\]"):
        load_dispatched(tiny_model, quantize="int8")


def test_a_model_without_linear_layers_is_refused() -> None:
    """GPT-2's are Conv1D; before, nothing was quantized, and nothing said so."""
    model = build_on_meta(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=257), "float32")
    with pytest.raises(
        ModelError, match=r"linear layers .* in their repeated blocks, and this GPT2LMHeadModel has none"
    ):
        plan_dispatch(model, DispatchConfig("cpu", {"cpu": "1GB"}, quantize="int8"))


def test_how_much_is_quantized() -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=7)
    model = build_on_meta(config, "float32")
    layers = quantized_layers(model, no_split_blocks(model), Int8())
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 7 * 32
    share = weights / (weights + 7 * 32 + 5 * 32)
    assert describe(model, layers) == f"15 linear layers with {share:.0%} of the parameters"


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mamba", "qwen2_moe"])
def test_layers_that_cannot_be_quantized_are_left_alone(tmp_path: Path, family: str, kind: str) -> None:
    """Mamba multiplies by the weight of `dt_proj` itself; Qwen2-MoE's gate of the shared expert has one row."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 257}
    if family == "qwen2_moe":
        of_experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 4}
        sizes |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, **of_experts}
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    expected.save_pretrained(tmp_path)
    quantized = load_dispatched(tmp_path, "cpu", quantize=kind)
    with torch.no_grad():
        logits, exact = quantized(IDS).logits, expected(IDS).logits
    assert 0 < (logits - exact).abs().max() <= 0.5 * exact.abs().max()


def test_what_int4_needs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7 + gpu, 5))
    with pytest.raises(ConfigError, match=r"int4 needs a GPU of compute capability 8.0 .* has 7.5. Set .*=int8"):
        check_gpu(torch.bfloat16, 0)
    with pytest.raises(ConfigError, match=r"needs weights in bfloat16 .* are in torch.float32. Set dispatch.dtype="):
        check_gpu(torch.float32, 1)
    check_gpu(torch.bfloat16, 1)


def test_int4_weights_are_filled_up_to_tiles_on_a_gpu() -> None:
    layer = nn.Linear(1056, 12, device="meta", dtype=torch.bfloat16)
    assert Int4().num_bytes(layer, on_gpu=False) == 12 * (1056 // 2 + 1056 // 32 * 4)
    assert Int4().num_bytes(layer, on_gpu=True) == 16 * (2048 // 2 + 2048 // 32 * 4)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_weights_take_what_is_planned(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    layer: Any = module[0]
    planned = Int4().num_bytes(layer, on_gpu=False)
    Int4().quantizer(module, {"0": [layer]}, "cpu").encode(layer)
    weight = layer.weight
    assert planned == weight.qdata.nbytes + weight.scale_and_zero.nbytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, vocab_size=257,
        max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("quantized")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "ratio", "tolerance"), [("int8", 0.52, 0.05), ("int4", 0.33, 0.5)])
def test_layers_are_quantized_and_the_rest_is_not(model: Path, kind: str, ratio: float, tolerance: float) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    layers = sum(param.nbytes for param in plain.model.layers.parameters())
    layers += plain.lm_head.weight.nbytes if kind == "int8" else 0
    rest = sum(param.nbytes for param in plain.parameters()) - layers
    fits = rest + int(ratio * layers)
    found: Any = load_dispatched(model, quantize=kind, max_memory={"cpu": fits})
    assert set(found.hf_device_map.values()) == {"cpu"}
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
        difference = (found(input_ids=IDS).logits - expected).abs().max()
    assert 0 < difference < tolerance * expected.abs().max()
    for name, module in found.named_modules():
        if isinstance(module, nn.Linear):
            is_plain = type(module.weight) is nn.Parameter and type(module.weight.data) is torch.Tensor
            assert is_plain == (name == "lm_head" and kind == "int4"), name
    with pytest.raises(PlanError, match=f"quantize={kind} is for models that fit when quantized"):
        load_dispatched(model, "disk", quantize=kind)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "rows", "bias"), [(33, 7, True), (128, 257, False), (352, 3000, True)])
def test_rows_in_8_bits_are_those_of_torchao(
    dtype: torch.dtype, width: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from fsdp_shard.inference import int8_linear as int8

    torch.manual_seed(0)
    monkeypatch.setattr(int8, "_CHUNK", 100 * width)
    layer = nn.Linear(width, rows, bias=bias, dtype=dtype).requires_grad_(False)
    theirs = copy.deepcopy(layer)
    quantize_(theirs, Int8WeightOnlyConfig(set_inductor_config=False))
    model = nn.Sequential(layer)
    (layer,) = int8.use_int8_products(model, {"0": [layer]})["0"]
    assert model[0] is layer
    int8.encode_in_rows(layer, lambda piece: quantize_(piece, Int8WeightOnlyConfig(set_inductor_config=False)))
    assert torch.equal(layer.weight.qdata, theirs.weight.qdata)  # type: ignore[attr-defined]  # torchao's tensor
    assert torch.equal(layer.weight.scale, theirs.weight.scale)  # type: ignore[attr-defined]  # the same
    given = torch.randn(2, 5, width, dtype=dtype)
    whole = nn.functional.linear(given, theirs.weight.dequantize(), theirs.bias)
    torch.testing.assert_close(layer(given), whole, rtol=2e-2, atol=2e-2)
    assert torch.equal(layer(given[:, -1:]), layer(given)[:, -1:])  # as generate() asks the head for the last token
    assert layer(given[0, 0]).shape == (rows,)
    many = torch.randn(2, 50, width, dtype=dtype)
    assert torch.equal(layer(many), theirs(many)), "torchao's own product"
    assert (type(layer) is int8.Int8Linear) == (width % 32 == 0)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_default_dtype_of_the_caller_changes_no_scale(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=257,
        max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = load_dispatched(tmp_path, "cpu", quantize="int8")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = load_dispatched(tmp_path, "cpu", quantize="int8")
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.arange(8)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_head_that_is_the_embedding_too_is_left_alone(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=257,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = load_dispatched(tmp_path, quantize="int8")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert type(found.lm_head.weight.data) is torch.Tensor
    assert type(found.model.layers[0].mlp.up_proj) is not nn.Linear
