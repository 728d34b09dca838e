"""Files of ranks: ours with a manifest, torch.save's of DTensors, and safetensors of torch's DCP."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.files import edit_header
from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import DEEP, DIGITS, Damage

_OURS = "shard-00001-of-00002.safetensors"
_TORCH = "model_world_size_2_rank_1.pt"
_HUGGINGFACE = "shard-00002-model-00001-of-00001.safetensors"
_NAME = "model.layers.0.mlp.down_proj.weight"


def _swap(one: str, two: str) -> Damage:
    return lambda root: (
        (root / one).rename(root / "x"),
        (root / two).rename(root / one),
        (root / "x").rename(root / two),
    )


def _copy(old: str, new: str) -> Damage:
    return lambda root: shutil.copy(root / old, root / new)


def _move(old: str, new: str) -> Damage:
    return lambda root: (root / old).rename(root / new)


def _header(file: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda root: edit_header(root / file, change)


def _noted(file: str, key: str, change: Callable[[Any], Any]) -> Damage:
    """The JSON in the metadata of a safetensors header, as `change` leaves or returns it; text is taken as it is."""

    def apply(document: dict[str, Any]) -> None:
        note = json.loads(document["__metadata__"][key])
        changed = change(note)
        document["__metadata__"][key] = changed if isinstance(changed, str) else json.dumps(changed or note)

    return _header(file, apply)


def _ours(change: Callable[[Any], Any]) -> Damage:
    """What our rank file says about itself; without the manifest, which would find any change."""
    return edits.both(edits.gone("manifest.json"), _noted(_OURS, "fsdp_shard", change))


def _offsets(change: Callable[[Any], Any]) -> Damage:
    return _noted(_HUGGINGFACE, "DCP_SHARDING_INFO", change)


def _state(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return edits.unpickled(_TORCH, change)


def _local(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Another local part of a DTensor, with all that says where it belongs."""

    def apply(state: dict[str, Any]) -> None:
        tensor = state[_NAME]
        tensor._local_tensor = change(tensor._local_tensor)

    return _state(apply)


_SHARDED: dict[str, Damage] = {
    "a rank gone": edits.gone(_OURS),
    "a rank empty": edits.content(_OURS, b""),
    "a rank cut short": edits.cut(_OURS, -100),
    "a rank a directory": edits.directory(_OURS),
    "a rank a FIFO": edits.fifo(_OURS),
    "a rank too many": _copy(_OURS, "shard-00002-of-00002.safetensors"),
    "a rank of another world": _move(_OURS, "shard-00001-of-00003.safetensors"),
    "ranks swapped": _swap(_OURS, "shard-00000-of-00002.safetensors"),
    "two of one rank": _copy("shard-00000-of-00002.safetensors", _OURS),
    "no manifest, a step of 5,000 digits": _ours(
        lambda note: json.dumps(note).replace('"step": null', f'"step": {DIGITS}')
    ),
    "no manifest, deep nesting": _ours(lambda note: f'{{"tensors": {DEEP}}}'),
    "no manifest, a list": _ours(lambda note: "[]"),
    "no manifest, tensors a list": _ours(lambda note: note.update(tensors=[1])),
    "no manifest, a tensor a text": _ours(lambda note: note["tensors"].update({_NAME: "x"})),
    "no manifest, a start of a text": _ours(lambda note: note["tensors"][_NAME].update(start="x")),
    "no manifest, a start of 2^80": _ours(lambda note: note["tensors"][_NAME].update(start=2**80)),
    "no manifest, a shape of texts": _ours(lambda note: note["tensors"][_NAME].update(shape=["x"])),
    "no manifest, a shape of 2^80": _ours(lambda note: note["tensors"][_NAME].update(shape=[2**80, 85])),
    "no manifest, a rank of a text": _ours(lambda note: note.update(rank="1")),
    "no manifest, another rank": _ours(lambda note: note.update(rank=0)),
    "no manifest, a world of true": _ours(lambda note: note.update(world_size=True)),
    "no manifest, a world of 10^9": _ours(lambda note: note.update(world_size=10**9)),
    "no manifest, another save": _ours(lambda note: note.update(save="other")),
    "no manifest, aliases a list": _ours(lambda note: note.update(aliases=[1])),
    "no manifest, an alias of itself": _ours(lambda note: note.update(aliases={"a": "a"})),
    "no manifest, an alias of a number": _ours(lambda note: note.update(aliases={"lm_head.weight": 5})),
}
_TORCH_RANKS: dict[str, Damage] = {
    "a rank gone": edits.gone(_TORCH),
    "a rank cut short": edits.cut(_TORCH, 5000),
    "a rank empty": edits.content(_TORCH, b""),
    "a rank too many": _copy(_TORCH, "model_world_size_2_rank_2.pt"),
    "a rank of 30 digits": _move(_TORCH, f"model_world_size_2_rank_{'1' * 30}.pt"),
    "a world of 30 digits": _move(_TORCH, f"model_world_size_{'2' * 30}_rank_1.pt"),
    "ranks swapped": _swap(_TORCH, "model_world_size_2_rank_0.pt"),
    "a tensor gone": _state(lambda state: [state.pop(_NAME), None][1]),
    "a tensor more": _state(lambda state: state.update(more=state[_NAME])),
    "a tensor that is plain": _state(lambda state: state.update({_NAME: torch.zeros(36, 85)})),
    "a tensor that is a text": _state(lambda state: state.update({_NAME: "x"})),
    "a list": _state(lambda state: [1]),
    "a smaller part": _local(lambda tensor: tensor[:-1].clone()),
    "a larger part": _local(lambda tensor: torch.zeros(40, 85)),
    "a part of one dimension": _local(lambda tensor: tensor.flatten()),
    "a part of another dtype": _local(lambda tensor: tensor.double()),
}
_TORCH_HF: dict[str, Damage] = {
    "a rank gone": edits.gone("shard-00001-model-00001-of-00001.safetensors"),
    "a rank twice": _copy(_HUGGINGFACE, "shard-00003-model-00001-of-00001.safetensors"),
    "a rank of 30 digits": _move(_HUGGINGFACE, f"shard-{'1' * 30}-model-00001-of-00001.safetensors"),
    "10^5 parts": _move(_HUGGINGFACE, "shard-00002-model-00001-of-99999.safetensors"),
    "part 0": _move(_HUGGINGFACE, "shard-00002-model-00000-of-00001.safetensors"),
    "offsets deep": _offsets(lambda note: DEEP),
    "offsets of 5,000 digits": _offsets(lambda note: f'{{"{_NAME}": {{"saved_offsets": [{DIGITS}, 0]}}}}'),
    "offsets null": _offsets(lambda note: "null"),
    "offsets of a number": _offsets(lambda note: note.update({_NAME: 5})),
    "offsets of texts": _offsets(lambda note: note[_NAME].update(saved_offsets=["a", "b"])),
    "offsets of true": _offsets(lambda note: note[_NAME].update(saved_offsets=[True, False])),
    "offsets negative": _offsets(lambda note: note[_NAME].update(saved_offsets=[-18, 0])),
    "offsets of 2^70": _offsets(lambda note: note[_NAME].update(saved_offsets=[2**70, 0])),
    "offsets that overlap": _offsets(lambda note: note[_NAME].update(saved_offsets=[17, 0])),
    "offsets that leave a gap": _offsets(lambda note: note[_NAME].update(saved_offsets=[19, 0])),
    "no offsets": _header(_HUGGINGFACE, lambda document: document.pop("__metadata__") and None),
    "another dtype": _header(_HUGGINGFACE, lambda document: document[_NAME].update(dtype="I32")),
}


def _linked(root: Path) -> None:
    """A rank's file is a link to another one's, inside the directory."""
    (root / _TORCH).unlink()
    os.symlink("model_world_size_2_rank_0.pt", root / _TORCH)


CASES = [
    *(Case(f"ours: {name}", damaged("sharded", damage)) for name, damage in _SHARDED.items()),
    *(Case(f"torch.save: {name}", damaged("torch-ranks", damage)) for name, damage in _TORCH_RANKS.items()),
    Case("torch.save: a rank a link to another", damaged("torch-ranks", _linked)),
    *(Case(f"safetensors: {name}", damaged("torch-huggingface", damage)) for name, damage in _TORCH_HF.items()),
]
