"""`verify` finds what loading refuses, without a false alarm on what transformers itself saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fsdp_shard import load_dispatched
from fsdp_shard.checkpoint import MANIFEST, convert, read_manifest, verify
from fsdp_shard.errors import CheckpointError
from tests.support.tiny import save_adapter, save_model

Tensors = dict[str, torch.Tensor]

_LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 24}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 2}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 97, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_heads": 4, "num_layers": 2},
    ),
    "bert": ("BertForMaskedLM", _BERT),
    "gemma3_text": ("Gemma3ForCausalLM", {**_LLAMA, "head_dim": 24}),
    "opt": (
        "OPTForCausalLM",
        {"vocab_size": 97, "hidden_size": 48, "word_embed_proj_dim": 24, "ffn_dim": 80, "num_hidden_layers": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA,
            "num_key_value_heads": 6,
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {"vocab_size": 97, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 80},
    ),
    "vit": ("ViTForImageClassification", {**_BERT, "image_size": 32}),
}


def saved(kind: str, directory: Path) -> Path:
    name, values = MODELS[kind]
    config = transformers.CONFIG_MAPPING[kind](**values)
    getattr(transformers, name)._from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.filterwarnings("ignore")  # transformers' own, about token ids beyond so small a vocabulary
@pytest.mark.parametrize("kind", MODELS)
def test_of_a_sound_model_nothing_is_said(kind: str, tmp_path: Path) -> None:
    report = verify(saved(kind, tmp_path))
    assert report.is_sound, str(report)
    assert report.notes == ()
    assert report.checked == ("structure", "NaN and infinities", "config.json")


def edited(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def with_more(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **{name: torch.ones(36) for name in names}}


_DOWN, _NORM = "model.layers.0.mlp.down_proj", "model.layers.1.input_layernorm.weight"
Damage = tuple[Callable[[Tensors], Tensors] | None, dict[str, Any], str]

DAMAGES: dict[str, Damage] = {
    "a tensor is missing": (lambda t: {k: v for k, v in t.items() if k != _NORM}, {}, f"lacks {_NORM}"),
    "a layer is missing": (None, {"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
    "transposed": (edited(f"{_DOWN}.weight", lambda t: t.T), {}, r"down_proj\.weight \[85, 36\] instead of \[36, 85\]"),
    "flat": (edited(f"{_DOWN}.weight", lambda t: t.flatten()), {}, r"\[3060\] instead of"),
    "a dimension more": (edited(_NORM, lambda t: t[None]), {}, r"\[1, 36\] instead of \[36\]"),
    "another vocabulary": (None, {"vocab_size": 300}, r"\[257, 36\] instead of \[300, 36\]"),
    "another number of heads": (None, {"num_attention_heads": 9, "head_dim": 4}, "instead of"),
    "another model's config": (None, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "q_proj.bias"),
    "tied, with two values": (None, {"tie_word_embeddings": True}, "with different values"),
    "integers": (edited(f"{_DOWN}.weight", lambda t: (t * 100).int()), {}, "as int32, where the model has float32"),
    "bits called integers": (edited(_NORM, lambda t: t.view(torch.int32)), {}, "as int32, where"),
    "bytes": (edited(_NORM, torch.Tensor.byte), {}, "as uint8, where"),
    "booleans": (edited(f"{_DOWN}.weight", torch.Tensor.bool), {}, "as bool, where"),
    "complex numbers": (edited(_NORM, lambda t: t.to(torch.complex64)), {}, "as complex64, where"),
    "a bias too many": (with_more(f"{_DOWN}.bias"), {}, f"holds {_DOWN}.bias, which belongs to layers"),
    "a scale": (with_more(f"{_DOWN}.weight_scale_2"), {}, "which belongs to layers"),
    "an adapter inside": (with_more(f"{_DOWN}.lora_A.weight"), {}, "which belongs to layers"),
}


def damaged(root: Path, damage: Damage) -> Path:
    change, settings, _ = damage
    save_model(root, tied=False)
    if change is not None:
        tensors = {name: tensor.contiguous() for name, tensor in change(load_file(root / "model.safetensors")).items()}
        save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | settings))
    return root


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_loading_refuses_is_found(name: str, is_sealed: bool, tmp_path: Path) -> None:
    """A manifest that was made of the damaged files has the right digests, and hides nothing."""
    root = damaged(tmp_path / "model", DAMAGES[name])
    if is_sealed:
        convert(root, tmp_path / "sealed")
        root = tmp_path / "sealed"
    with pytest.raises(CheckpointError, match=DAMAGES[name][2]) as caught:
        load_dispatched(root, "cpu")
    (problem,) = verify(root).problems
    assert problem.message == str(caught.value)
    assert str(root) in problem.message
    assert verify(root).content_checked == is_sealed


@pytest.mark.parametrize("writer", ["header", "manifest"])
def test_a_tie_that_the_model_does_not_have_is_found(writer: str, tmp_path: Path) -> None:
    """safetensors' save_model and our manifests name tied tensors; transformers takes no notice of either."""
    one, two = (f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1))
    root = save_model(tmp_path / "model", tied=False)
    tensors = load_file(root / "model.safetensors")
    tensors.pop(two)
    save_file(tensors, root / "model.safetensors", {"format": "pt"} | ({two: one} if writer == "header" else {}))
    if writer == "manifest":
        convert(root, tmp_path / "sealed")
        root = tmp_path / "sealed"
        manifest = read_manifest(root)
        assert manifest is not None
        (root / MANIFEST).write_text(replace(manifest, aliases={two: one}).to_json())
    with pytest.raises(CheckpointError, match=r"q_proj\.weight, and says that it is tied to") as caught:
        load_dispatched(root, "cpu")
    assert [problem.message for problem in verify(root).problems] == [str(caught.value)]


def test_layers_that_the_config_leaves_out_are_found(tmp_path: Path) -> None:
    """transformers computes without them, and so do we, with a line."""
    root = damaged(tmp_path / "model", (None, {"num_hidden_layers": 1}, ""))
    with pytest.warns(UserWarning, match="left out model.layers.1"):
        load_dispatched(root, "cpu")
    (problem,) = verify(root).problems
    assert problem.message.endswith("it gives model.layers 1 layers, and there is model.layers.1.")


def test_what_the_model_does_not_have_is_noted(tmp_path: Path) -> None:
    report = verify(damaged(tmp_path / "model", (with_more("score.weight", "v_head.weight"), {}, "")))
    assert report.is_sound
    assert report.notes == (f"not in the model of {tmp_path}/model/config.json: score.weight, v_head.weight",)
    assert report.notes[0] in str(report)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    root = save_model(tmp_path / "model")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"model_type": "unheard of"}))
    assert "its model type is not one of transformers" in verify(root).notes[0]
    (root / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "own.Model"}}))
    assert "or has code of its own" in verify(root).notes[0]
    (root / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    assert str(root) in verify(root).problems[0].message
    (root / "config.json").write_text(json.dumps(config))
    tensors = load_file(root / "model.safetensors")
    name = f"{_DOWN}.weight"
    packed = {**tensors, name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(packed, root / "model.safetensors", {"format": "pt"})
    assert "the weights are quantized (fp8)" in verify(root).notes[0]


def test_an_adapter_is_compared_with_its_base(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    report = verify(adapter)
    assert report.is_sound
    assert report.notes == ()
    (base / "model.safetensors").rename(base / "other.bin")
    assert "is an adapter of" in verify(adapter).problems[0].message
    shutil.rmtree(base)
    report = verify(adapter)  # of a base on the hub nothing is asked
    assert report.is_sound
    assert report.notes == (f"not compared with its base model: {base} is not a directory on this machine",)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in ("http://host/model", "a" * 300, "~nobody-of-this-name/x", "a\0b"):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        assert "not compared with its base model" in verify(adapter).notes[0]
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "a" * 5000}))
    assert "adapter_config.json has no base_model" in verify(adapter).problems[0].message
