"""Tensors that a model keeps in float32 beside weights in 16 bits: as `from_pretrained` and `save_pretrained` do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_shard.checkpoint import convert
from fsdp_shard.checkpoint.keys.kept_dtypes import WITHOUT_EXCEPTIONS
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import build_on_meta
from tests.support.commands import run
from tests.support.tiny import byte_tokenizer, llama

DEEPSEEK = DeepseekV3Config(
    vocab_size=257, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=16, num_experts_per_tok=2, n_group=4, topk_group=2,
    first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    dtype="float32",
)  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("deepseek")
    model = AutoModelForCausalLM.from_config(DEEPSEEK)
    with torch.no_grad():  # close to each other and far from 0, where bfloat16 has few values
        model.get_buffer(BIAS).copy_(10 + 0.03 * torch.randn(16))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_what_transformers_saves(deepseek: Path, tmp_path: Path, dtype: str) -> None:
    AutoModelForCausalLM.from_pretrained(deepseek, dtype=dtype).save_pretrained(tmp_path / "theirs")
    report = convert(deepseek, tmp_path / "ours", dtype=dtype)
    assert report.notes == (f"kept in float32, as the model loads them: 1 tensor ({BIAS} first)",)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert ours[BIAS].dtype == torch.float32
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def test_float16_has_more_exceptions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=257, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dtype="float32")
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    for dtype, num in (("float16", 2), ("bfloat16", 0)):
        convert(tmp_path / "t5", tmp_path / dtype, dtype=dtype)
        found = load_file(tmp_path / dtype / "model.safetensors")
        assert sum(tensor.dtype == torch.float32 for tensor in found.values()) == num


def test_what_is_stored_in_16_bits_stays_as_it_is(deepseek: Path, tmp_path: Path) -> None:
    convert(deepseek, tmp_path / "narrow", dtype="bfloat16")
    (tmp_path / "narrow" / "manifest.json").unlink()
    tensors = load_file(tmp_path / "narrow" / "model.safetensors")
    tensors[BIAS] = tensors[BIAS].bfloat16()
    save_file(tensors, tmp_path / "narrow" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "narrow", tmp_path / "again", dtype="bfloat16")
    assert load_file(tmp_path / "again" / "model.safetensors")[BIAS].dtype == torch.bfloat16


def test_a_model_in_bfloat16_has_the_buffers_of_transformers(deepseek: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(deepseek, dtype="bfloat16")
    expected = {name: buffer.dtype for name, buffer in theirs.named_buffers()}
    config: PreTrainedConfig = theirs.config
    assert {name: buffer.dtype for name, buffer in build_on_meta(config, "bfloat16").named_buffers()} == expected
    assert expected[BIAS] == torch.float32
    ids = torch.randint(0, 257, (2, 9))
    with torch.no_grad():
        ours = load_dispatched(deepseek, "cpu", dtype="bfloat16")
        assert torch.equal(ours(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)


def test_a_model_that_cannot_be_built_is_said(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lamma"'))
    (note,) = convert(tmp_path / "model", tmp_path / "cast", dtype="bfloat16").notes
    assert note.startswith("all tensors are cast, as which the model keeps in float32 is not known: ")
    assert {tensor.dtype for tensor in load_file(tmp_path / "cast" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", sorted(WITHOUT_EXCEPTIONS))
def test_types_without_exceptions_have_none(model_type: str) -> None:
    """In none of their classes, which are those of the file that has the class of the causal or masked LM."""
    config = CONFIG_MAPPING[model_type]
    (built, *_) = [mapping[config] for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING) if config in mapping]
    module = sys.modules[built.__module__]
    classes = [
        found for found in vars(module).values() if isinstance(found, type) and issubclass(found, PreTrainedModel)
    ]
    assert len(classes) > 2
    for found in classes:
        assert not found._keep_in_fp32_modules, found
        assert not found._keep_in_fp32_modules_strict, found


@pytest.mark.long
def test_a_cast_of_such_a_type_imports_no_transformers(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    program = "import sys, fsdp_shard; fsdp_shard.convert('model', 'cast', dtype='bfloat16')\n"
    program += "assert 'transformers' not in sys.modules"
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.status == 0, done.err


def test_llama_has_no_exceptions(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    assert convert(tmp_path / "model", tmp_path / "cast", dtype="float16").notes == ()
