"""Names that a terminal obeys or that have no end: of tensors, files, modules, models, in every file that has some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoint.files import edit_header
from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_NAMES = {
    "that clears the screen": "x\x1b[2J\x1b]0;title\x07",
    "of two lines": "x\nerror: all is well",
    "in reverse": "x\u202egnp.exe",
    "of a C1 control": "x\x9b31m",
    "of half a surrogate": "x\ud800y",
    "of a megabyte": "x" * 1_000_000,
}
_PREFIX = "base_model.model.model.layers.0.self_attn."


def _in_header(name: str) -> Damage:
    """A tensor more, in the header of a safetensors file."""

    def change(document: dict[str, Any]) -> None:
        first = next(key for key in document if key != "__metadata__")
        document[name] = document[first]

    return lambda root: edit_header(root / "model.safetensors", change)


def _renamed(name: str) -> Damage:
    def change(document: dict[str, Any]) -> None:
        document[name] = document.pop("model.norm.weight")

    return lambda root: edit_header(root / "model.safetensors", change)


def _in_index(name: str) -> Damage:
    return edits.edit(
        "model.safetensors.index.json", lambda document: document["weight_map"].update({"model.norm.weight": name})
    )


def _in_manifest(name: str) -> Damage:
    return edits.sealed_manifest(lambda document: document["files"].update({name: {"size": 3, "digest": None}}))


def _in_adapter(name: str) -> Damage:
    def apply(root: Path) -> None:
        tensors = load_file(root / "adapter_model.safetensors")
        clean = name.encode("utf-8", "replace").decode()
        tensors[f"{_PREFIX}{clean}.lora_A.weight"] = tensors[f"{_PREFIX}q_proj.lora_A.weight"].clone()
        save_file(tensors, root / "adapter_model.safetensors", {"format": "pt"})

    return apply


def _field(file: str, key: str) -> Callable[[str], Damage]:
    return lambda name: edits.fields(file, **{key: name})


def _in_added_token(name: str) -> Damage:
    token = {"content": "<s>", name: True}
    return edits.edit(
        "tokenizer_config.json", lambda document: document.update(added_tokens_decoder={"0": token}, unk_token="<s>")
    )


def _template(name: str) -> Damage:
    return edits.content(
        "chat_template.jinja", "{{ raise_exception(" + json.dumps(name.encode("utf-8", "replace").decode()) + ") }}"
    )


# Where the name is: the sound checkpoint, how it comes there, what then is damaged.
_PLACES: dict[str, tuple[str, Callable[[str], Damage], str]] = {
    "a tensor more": ("model", _in_header, "weights"),
    "a tensor": ("model", _renamed, "weights"),
    "a file in an index": ("indexed", _in_index, "headers"),
    "a file in a manifest": ("sealed", _in_manifest, "headers"),
    "model_type": ("model", _field("config.json", "model_type"), "config"),
    "an activation": ("model", _field("config.json", "hidden_act"), "config"),
    "a tokenizer's class": ("model", _field("tokenizer_config.json", "tokenizer_class"), "tokenizer"),
    "a setting of an added token": ("model", _in_added_token, "tokenizer"),
    "what a template raises": ("model", _template, "chat"),
    "the base of an adapter": ("adapter", _field("adapter_config.json", "base_model_name_or_path"), "adapter"),
    "the type of an adapter": ("adapter", _field("adapter_config.json", "peft_type"), "adapter"),
    "a module of an adapter": ("adapter", _in_adapter, "adapter"),
}

CASES = [
    Case(f"{place} {kind}", damaged(base, damage(name)), expect="any", damages=damages)
    for place, (base, damage, damages) in _PLACES.items()
    for kind, name in _NAMES.items()
]
