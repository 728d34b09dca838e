"""Adapters that peft writes, what it makes of them, and files that were changed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


def save(model: Any, settings: dict[str, Any], directory: Path, **options: Any) -> None:
    """Write a LoRA of `model` with random weights, as peft does, with these settings and options of the save."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_alpha=7, init_lora_weights=False, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) / 100
        adapted.save_pretrained(str(directory), **options)
    edit(directory, {"init_lora_weights": True}, None)  # as files of real training have it


def edit(directory: Path, settings: dict[str, Any], change: Change | None) -> None:
    """Change the settings of an adapter, where None removes one, and its tensors."""
    config = json.loads((directory / "adapter_config.json").read_text()) | settings
    kept = {key: value for key, value in config.items() if key not in settings or value is not None}
    (directory / "adapter_config.json").write_text(json.dumps(kept))
    if change is not None:
        tensors = change(load_file(directory / "adapter_model.safetensors"))
        copied = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(copied, directory / "adapter_model.safetensors", {"format": "pt"})


def by_peft(adapter: Path, base: Path, cls: Any = AutoModelForCausalLM) -> Tensors:
    """The tensors of the base with the adapter, as peft merges them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(cls.from_pretrained(base), adapter)
        found: Tensors = model.merge_and_unload().state_dict()
    return found


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    """Compare all tensors, but for rounding."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
