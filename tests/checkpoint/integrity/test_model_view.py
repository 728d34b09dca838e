"""The same weights, as transformers stores them (tied once, experts apart) and as a state dict (each name, stacked)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.diff import diff
from fsdp_shard.checkpoint.integrity.verify import verify

_TOKENS: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2))


def marian() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")
    }
    sizes |= {"encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "d_model": 8, "max_position_embeddings": 16}
    return MarianMTModel(MarianConfig(vocab_size=31, **sizes, **_TOKENS))


def mixtral() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return MixtralForCausalLM(MixtralConfig(vocab_size=31, **sizes, num_key_value_heads=1, num_local_experts=3))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], list[str]]] = {
    "t5": (t5, ["lm_head.weight", "encoder.embed_tokens.weight", "shared.weight"]),
    "marian": (marian, ["lm_head.weight", "model.encoder.embed_positions.weight"]),
    "mixtral": (mixtral, ["model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.gate_up_proj"]),
}


def save(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Write a model as transformers does, and its state dict with every name."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    model.save_pretrained(tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "state")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "state" / "model.safetensors", {"format": "pt"})
    return tmp_path / "saved", tmp_path / "state"


def change(directory: Path, apply: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(directory / "model.safetensors")
    apply(state)
    save_file(state, directory / "model.safetensors", {"format": "pt"})


def assert_equal(one: Path, two: Path) -> None:
    for a, b in ((one, two), (two, one)):
        assert verify(a, b).is_sound
        report = diff(a, b)
        assert [*report.missing, *report.extra, *report.differences] == []


@pytest.mark.parametrize("name", MODELS)
def test_names_of_files_and_of_the_model_are_the_same_weights(name: str, tmp_path: Path) -> None:
    saved, state = save(tmp_path, name)
    assert_equal(saved, state)
    (state / "config.json").unlink()  # the other one's describes both
    assert_equal(saved, state)


@pytest.mark.parametrize(("name", "tensor"), [(name, tensor) for name in MODELS for tensor in MODELS[name][1]])
def test_a_change_of_one_of_several_names_is_found(name: str, tensor: str, tmp_path: Path) -> None:
    saved, state = save(tmp_path, name)
    change(state, lambda tensors: tensors[tensor].view(-1)[-1].add_(1))
    for one, two in ((saved, state), (state, saved)):
        (problem,) = verify(one, two).problems
        assert problem.tensor == tensor
        assert {place.file for place in problem.places} == {"model.safetensors"}
        assert len(problem.places) == (1 if "embed_positions" in tensor else 2)  # computed positions are in no file
        report = diff(one, two)
        assert [difference.name for difference in report.differences] == [tensor]
        assert [*report.missing, *report.extra] == []


def test_casts_are_compared_under_the_names_of_the_model(tmp_path: Path) -> None:
    saved, state = save(tmp_path, "mixtral")
    change(state, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    report = verify(state, saved)
    assert report.is_sound
    assert report.num_cast == len(load_file(state / "model.safetensors"))


def test_tensors_of_one_side_alone_are_found(tmp_path: Path) -> None:
    saved, state = save(tmp_path, "mixtral")
    change(state, lambda tensors: tensors.update(more=torch.ones(2)))
    (problem,) = verify(saved, state).problems
    assert problem.message == f"tensor more is in {state}, but not in {saved}."
    change(saved, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    assert {problem.tensor for problem in verify(saved, state).problems} >= {"model.layers.0.mlp.experts.down_proj"}


def test_a_tensor_stored_in_two_forms_hides_no_other(tmp_path: Path) -> None:
    """One side has the experts apart, and stacked ones with other values too."""
    saved, other = save(tmp_path, "mixtral")[0], tmp_path / "other"
    shutil.copytree(saved, other)
    name = "model.layers.0.mlp.experts.down_proj"
    stacked = mixtral().state_dict()[name] + 1
    change(other, lambda tensors: tensors.update({name: stacked}))
    for one, two in ((saved, other), (other, saved)):
        (problem,) = verify(one, two).problems
        assert problem.message == f"tensor {name} is in {other}, but not in {saved}."


def test_a_report_counts_what_is_stored(tmp_path: Path) -> None:
    saved, state = save(tmp_path, "mixtral")
    assert verify(saved, state).num_tensors == len(load_file(saved / "model.safetensors"))


def test_without_a_config_the_names_in_the_files_are_compared(tmp_path: Path) -> None:
    saved, state = save(tmp_path, "t5")
    for directory in (saved, state):
        (directory / "config.json").unlink()
    assert {problem.tensor for problem in verify(saved, state).problems} == {
        "decoder.embed_tokens.weight",
        "encoder.embed_tokens.weight",
        "lm_head.weight",
    }


def test_the_manifest_is_compared_before_the_names_change(tmp_path: Path) -> None:
    saved, state = save(tmp_path, "mixtral")
    convert(saved, tmp_path / "converted")
    assert_equal(tmp_path / "converted", state)
    file = tmp_path / "converted" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    written, differs = verify(tmp_path / "converted", state).problems
    assert written.message.endswith("is not what was written.")
    assert differs.message.startswith(f"tensor {differs.tensor} differs")
