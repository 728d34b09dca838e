"""Adapters of peft: adapter_config.json with wrong types and lies, tensors that are none of LoRA, no base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.faults.corpus import bases, edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import DEEP, DIGITS, Damage

_FILE, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def _set(**values: Any) -> Damage:
    return edits.fields(_FILE, **values)


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def apply(root: Path) -> None:
        tensors = load_file(root / _WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / _WEIGHTS, {"format": "pt"})

    return apply


def _renamed(old: str, new: str) -> Damage:
    return _tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def _on_base(damage: Damage) -> Damage:
    """The adapter of a copy of the model inside its own directory, after `damage` of that."""

    def apply(root: Path) -> None:
        damage(bases.copy("model", root / "base"))
        document = json.loads((root / _FILE).read_text())
        (root / _FILE).write_text(json.dumps(document | {"base_model_name_or_path": str(root / "base")}))

    return apply


def _of_itself(root: Path) -> None:
    document = json.loads((root / _FILE).read_text())
    (root / _FILE).write_text(json.dumps(document | {"base_model_name_or_path": str(root)}))


_HEADERS: dict[str, Damage] = {
    "cut short": edits.cut(_FILE, 100),
    "empty": edits.content(_FILE, b""),
    "a list": edits.content(_FILE, "[1]"),
    "no UTF-8": edits.content(_FILE, b'{"peft_type": "\xff"}'),
    "deep nesting": edits.literal(_FILE, "comment", DEEP),
    "r of 5,000 digits": edits.literal(_FILE, "r", DIGITS),
    "a key twice": lambda root: (root / _FILE).write_text('{"peft_type": "LORA", "peft_type": "LORA"}'),
    "no peft_type": edits.without(_FILE, "peft_type"),
    "peft_type a list": _set(peft_type=["LORA"]),
    "the weights cut short": edits.cut(_WEIGHTS, -10),
    "the weights empty": edits.content(_WEIGHTS, b""),
    "the weights a FIFO": edits.fifo(_WEIGHTS),
}
_MERGES: dict[str, Damage] = {
    "peft_type of another kind": _set(peft_type="PREFIX_TUNING"),
    "no base": edits.without(_FILE, "base_model_name_or_path"),
    "base null": _set(base_model_name_or_path=None),
    "base a number": _set(base_model_name_or_path=7),
    "base a list": _set(base_model_name_or_path=["x"]),
    "base empty": _set(base_model_name_or_path=""),
    "base missing": _set(base_model_name_or_path="/nowhere/model"),
    "base with NUL": _set(base_model_name_or_path="a\0b"),
    "base of 10,000 letters": _set(base_model_name_or_path="/" + "a" * 10_000),
    "base of itself": _of_itself,
    "base without weights": _on_base(edits.gone("model.safetensors")),
    "base damaged": _on_base(edits.cut("model.safetensors", -50)),
    "lora_alpha a text": _set(lora_alpha="8"),
    "lora_alpha null": _set(lora_alpha=None),
    "lora_alpha true": _set(lora_alpha=True),
    "lora_alpha a list": _set(lora_alpha=[8]),
    "lora_alpha of 400 digits": edits.literal(_FILE, "lora_alpha", "1" * 400),
    "alpha_pattern a list": _set(alpha_pattern=["q_proj"]),
    "alpha_pattern a text": _set(alpha_pattern="q_proj"),
    "alpha_pattern of a broken regex": _set(alpha_pattern={"((": 8}),
    "alpha_pattern of texts": _set(alpha_pattern={"q_proj": "8"}),
    "init_lora_weights of pissa": _set(init_lora_weights="pissa"),
    "init_lora_weights a list": _set(init_lora_weights=["x"]),
    "use_dora": _set(use_dora=True),
    "lora_bias": _set(lora_bias=True),
    "layer_replication": _set(layer_replication=[[0, 1]]),
    "only one factor": _tensors(lambda tensors: tensors.pop(_B)),
    "factors of other ranks": _tensors(lambda tensors: tensors.update({_B: torch.zeros(36, 5)})),
    "a factor of one dimension": _tensors(lambda tensors: tensors.update({_A: torch.zeros(36)})),
    "a factor of three dimensions": _tensors(lambda tensors: tensors.update({_A: torch.zeros(2, 36, 1)})),
    "a factor of integers": _tensors(lambda tensors: tensors.update({_A: torch.zeros(2, 36, dtype=torch.int32)})),
    "factors of another width": _tensors(lambda tensors: tensors.update({_A: torch.zeros(2, 40)})),
    "a module of no model": _renamed(_A, _A.replace("q_proj", "magic")),
    "a magnitude of DoRA": _tensors(
        lambda tensors: tensors.update({_A.replace("lora_A", "lora_magnitude_vector"): torch.ones(36)})
    ),
    "a tensor of no base": _tensors(lambda tensors: tensors.update({"base_model.model.magic": torch.ones(3)})),
    "a tied tensor as a whole": _tensors(
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": torch.ones(257, 36)})
    ),
}
_EITHER: dict[str, Damage] = {
    "auto_mapping a text": _set(auto_mapping="x"),
    "revision a number": _set(revision=5),
    "revision above the cache": _set(revision="../../x", base_model_name_or_path="org/name"),
    "r a text": _set(r="2"),
    "r a list": _set(r=[2]),
    "target_modules a number": _set(target_modules=5),
    "target_modules of numbers": _set(target_modules=[5]),
    "target_modules a broken regex": _set(target_modules="(("),
    "target_parameters a number": _set(target_parameters=5),
    "target_parameters of numbers": _set(target_parameters=[5]),
    "target_parameters of an adapted module": _set(target_parameters=["q_proj.weight"]),
    "target_parameters of a norm": _set(target_parameters=["input_layernorm.weight"]),
    "target_parameters of nothing": _set(target_parameters=["magic"]),
    "modules_to_save a number": _set(modules_to_save=5),
    "rank_pattern a list": _set(rank_pattern=[1]),
    "rank_pattern of texts": _set(rank_pattern={"q_proj": "2"}),
    "fan_in_fan_out a text": _set(fan_in_fan_out="maybe"),
    "use_rslora a text": _set(use_rslora="maybe"),
    "bias unknown": _set(bias="magic"),
    "task_type unknown": _set(task_type="MAGIC"),
    "lora_dropout a text": _set(lora_dropout="x"),
    "layers_to_transform a text": _set(layers_to_transform="x"),
    "peft_version a list": _set(peft_version=[1]),
    "an unknown key": _set(magic=True),
    "no tensors": _tensors(lambda tensors: tensors.clear()),
    "a base model of another kind": edits.content("base_model.json", "[1]"),
    "a base model without fingerprint": edits.content("base_model.json", "{}"),
    "a base model cut short": edits.content("base_model.json", '{"fing'),
}

CASES = [
    Case("base without config", damaged("adapter", _on_base(edits.gone("config.json"))), damages="config"),
    *(Case(name, damaged("adapter", damage)) for name, damage in _HEADERS.items()),
    *(Case(name, damaged("adapter", damage), damages="adapter") for name, damage in _MERGES.items()),
    *(Case(name, damaged("adapter", damage), expect="any", damages="adapter") for name, damage in _EITHER.items()),
]
