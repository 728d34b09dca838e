"""An adapter that is compared with a model is compared as the model that it makes of its base."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import convert, diff, verify
from tests.support.tiny import save_adapter, save_model


@pytest.fixture(params=["float32", "bfloat16"])
def adapter(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An adapter with a scale that is no power of two, so that the order of the roundings matters."""
    convert(save_model(tmp_path / "float32"), tmp_path / "base", dtype=request.param)
    found = save_adapter(tmp_path / "adapter", tmp_path / "base")
    config = json.loads((found / "adapter_config.json").read_text()) | {"lora_alpha": 7}
    (found / "adapter_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(params=["peft", "convert"])
def merged(adapter: Path, request: pytest.FixtureRequest) -> Path:
    target = adapter.parent / "merged"
    if request.param == "convert":
        convert(adapter, target)
        return target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapter.parent / "base"), adapter)
        model.merge_and_unload().save_pretrained(target)
    return target


def test_an_adapter_has_the_content_of_the_merged_model(adapter: Path, merged: Path) -> None:
    for one, two in ((adapter, merged), (merged, adapter)):
        report = verify(one, two)
        assert report.is_sound, str(report)
        assert report.num_tensors == 20
        assert diff(one, two).is_equal
    assert verify(adapter, adapter).num_tensors == 8, "two adapters are compared by their own tensors"


def test_another_model_differs(adapter: Path) -> None:
    base = adapter.parent / "base"
    changed = {problem.tensor for problem in verify(adapter, base).problems}
    expected = {f"model.layers.{n}.{module}.weight" for n in (0, 1) for module in ("self_attn.q_proj", "mlp.down_proj")}
    assert changed == expected
    assert {difference.name for difference in diff(base, adapter).differences} == expected


def test_a_change_of_the_adapter_is_found(adapter: Path) -> None:
    convert(adapter, adapter.parent / "merged")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] += torch.ones(1)
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    report = verify(adapter, adapter.parent / "merged")
    assert not report.is_sound
    assert f"merged with {adapter}" in report.problems[0].message


def test_without_its_base_an_adapter_cannot_be_compared(adapter: Path) -> None:
    convert(adapter, adapter.parent / "merged")
    (adapter.parent / "base").rename(adapter.parent / "moved")
    (problem,) = verify(adapter, adapter.parent / "merged").problems
    assert "adapter is an adapter of" in problem.message
    assert "base, which cannot be read" in problem.message
