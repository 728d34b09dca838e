"""Files of ranks: ours with a manifest, torch.save's of DTensors, and safetensors of torch's DCP."""

from __future__ import annotations

import json
import os
import pickle
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
_INDEX = "shards.index.json"
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
    """What our rank file says about itself; without manifest and index, which would find any change."""
    return edits.both(edits.gone("manifest.json"), edits.gone(_INDEX), _noted(_OURS, "fsdp_shard", change))


def _index(change: Callable[[Any], Any]) -> Damage:
    """What the index of our rank files says, sealed again; without the manifest, which would find any change."""
    return edits.both(edits.gone("manifest.json"), lambda root: edits.seal(root, change, _INDEX))


def _all_held(value: Any) -> Damage:
    return _index(lambda document: [division.update(held=value) for division in document["divisions"]] and None)


def _first(key: str, value: Any) -> Damage:
    """The first of a list in the index."""
    return _index(lambda document: document[key].__setitem__(0, value))


def _bomb(document: dict[str, Any]) -> None:
    """Ragged ranges of a tensor of many dimensions, each of which would be many boxes."""
    held = [[0, 0, 3]] * 100_000
    document["divisions"][0] = {"shape": [3] * 64, "held": held}


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


_FILES: dict[str, Damage] = {  # found by the headers, or with an index when the file is opened
    "a rank empty": edits.content(_OURS, b""),
    "a rank cut short": edits.cut(_OURS, -100),
    "a rank a directory": edits.directory(_OURS),
    "a rank a FIFO": edits.fifo(_OURS),
    "ranks swapped": _swap(_OURS, "shard-00000-of-00002.safetensors"),
    "two of one rank": _copy("shard-00000-of-00002.safetensors", _OURS),
}
_SHARDED: dict[str, Damage] = {
    **{f"no index, {name}": edits.both(edits.gone(_INDEX), damage) for name, damage in _FILES.items()},
    "a rank gone": edits.gone(_OURS),
    "a rank too many": _copy(_OURS, "shard-00002-of-00002.safetensors"),
    "a rank of another world": _move(_OURS, "shard-00001-of-00003.safetensors"),
    "index cut short": edits.cut(_INDEX, 500),
    "index empty": edits.content(_INDEX, b""),
    "index a list": edits.content(_INDEX, b"[]"),
    "index changed": edits.replaced(_INDEX, b'"F32"', b'"I32"'),
    "index deep": edits.both(edits.gone("manifest.json"), edits.content(_INDEX, f'{{"kind": {DEEP}}}')),
    "index with other digits": edits.both(edits.gone("manifest.json"), edits.replaced(_INDEX, b'"F32"', b'"I32"')),
    "index of another kind": _index(lambda document: document.update(kind="other")),
    "index of version 2": _index(lambda document: document.update(format_version=2)),
    "index with a key more": _index(lambda document: document.update(more=1)),
    "index without files": _index(lambda document: document.update(files=[])),
    "index of 3 files": _index(lambda document: document["files"].append(document["files"][0])),
    "index without tensors": _index(lambda document: document.update(tensors={})),
    "index with a tensor more": _index(lambda document: document["tensors"].update(more=["F32", 0])),
    "index with a tensor less": _index(lambda document: document["tensors"].pop(_NAME) and None),
    "index with an unknown dtype": _index(lambda document: document["tensors"].update({_NAME: ["F31", 0]})),
    "index with a wider dtype": _index(lambda document: document["tensors"][_NAME].__setitem__(0, "F64")),
    "index with a division of -1": _index(lambda document: document["tensors"][_NAME].__setitem__(1, -1)),
    "index with a division of 10^9": _index(lambda document: document["tensors"][_NAME].__setitem__(1, 10**9)),
    "index with a division of true": _index(lambda document: document["tensors"][_NAME].__setitem__(1, True)),
    "index with another division": _index(lambda document: document["tensors"][_NAME].__setitem__(1, 0)),
    "index with a tensor null": _index(lambda document: document["tensors"].update({_NAME: None})),
    "index with files null": _first("files", None),
    "index with a file of 2^80 bytes": _first("files", [2**80, 1, "0", 0]),
    "index with a file of other bytes": _index(lambda document: document["files"][0].__setitem__(0, 9)),
    "index with a header of other bytes": _index(lambda document: document["files"][0].__setitem__(1, 9)),
    "index with a file of another layout": _index(lambda document: document["files"][0].__setitem__(3, 1)),
    "index with a file of no layout": _index(lambda document: document["files"][0].__setitem__(3, 99)),
    "index with a layout null": _first("layouts", None),
    "index with a layout empty": _first("layouts", []),
    "index with a layout of texts": _first("layouts", [["0", "0"]]),
    "index with offsets that overlap": _index(lambda document: document["layouts"][0][1].__setitem__(1, 0)),
    "index with an offset of 2^70": _index(lambda document: document["layouts"][0][1].__setitem__(1, 2**70)),
    "index with a tensor twice": _index(lambda document: document["layouts"][0].append(document["layouts"][0][0])),
    "index with a division null": _first("divisions", None),
    "index with nothing held": _all_held([]),
    "index with a rank of 10^6": _all_held([[10**6, 0, 1]]),
    "index with a range of 2^70": _all_held([[0, 0, 2**70]]),
    "index with a range of texts": _all_held([["0", "0", "1"]]),
    "index with a box of no dimensions": _all_held([[0, [], []]]),
    "index with a box outside": _all_held([[0, [1 << 40], [1]]]),
    "index with a box of 10^5 dimensions": _all_held([[0, [0] * 100_000, [1] * 100_000]]),
    "index with boxes and ranges": _all_held([[0, [0, 0], [1, 1]], [1, 5, 1 << 50]]),
    "index with a shape of 2^70": _first("divisions", {"shape": [2**70], "held": [[0, 0, 1]]}),
    "index with a shape of no elements": _first("divisions", {"shape": [0, 5], "held": [[0, 0, 5]]}),
    "index with many dimensions": _index(_bomb),
    "index with aliases a list": _index(lambda document: document.update(aliases=[1])),
    "index with an alias of nothing": _index(lambda document: document.update(aliases={"lm_head.weight": "gone"})),
    "index with an alias of a number": _index(lambda document: document.update(aliases={"lm_head.weight": 5})),
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


def _described(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """What `metadata.pkl` says of the item `model`, changed in place; or as `change` returns it."""

    def apply(root: Path) -> None:
        document = pickle.loads((root / "metadata.pkl").read_bytes())
        changed = change(document["metadata"]["model"])
        if isinstance(changed, dict):
            document["metadata"]["model"] = changed
        (root / "metadata.pkl").write_bytes(pickle.dumps(document))

    return apply


def _data(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """How a tensor is sharded."""
    path = f'["{_NAME}"]'
    return _described(
        lambda item: change(item["nested_path_to_metadata"][path][0]["sharding_metadata"]["data"]) and None
    )


def _layout(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return _described(lambda item: change(item["rank_to_layout_info"][1]) and None)


def _repeated(item: dict[str, Any]) -> dict[str, Any]:
    """One list of groups of many ranks, under many paths: a pickle has it once."""
    (groups,) = list(item["nested_path_to_metadata"].values())[:1]
    many = tuple(range(100_000))
    group = {**groups[0], "ranks": many}
    groups = [group] * 1000
    return {**item, "nested_path_to_metadata": {f'["{number}"]': groups for number in range(20_000)}}


_PART = "part-1.safetensors"
_CHECKPOINTING: dict[str, Damage] = {
    "a rank gone": edits.gone(_PART),
    "a rank cut short": edits.cut(_PART, -100),
    "a rank empty": edits.content(_PART, b""),
    "a rank a FIFO": edits.fifo(_PART),
    "metadata cut short": edits.cut("metadata.pkl", 5000),
    "a file outside": _layout(lambda layout: layout.update(file_path="../part.safetensors")),
    "a file by its whole path": _layout(lambda layout: layout.update(file_path="/etc/hostname")),
    "a file of a number": _layout(lambda layout: layout.update(file_path=5)),
    "a file of another rank": _layout(lambda layout: layout.update(file_path="part-0.safetensors")),
    "another serialization": _layout(lambda layout: layout.update(serialization_format={"type": "TorchSerialization"})),
    "a serialization null": _layout(lambda layout: layout.update(serialization_format=None)),
    "no layouts": _described(lambda item: item.update(rank_to_layout_info=None)),
    "no tensors": _described(lambda item: item.update(nested_path_to_metadata={})),
    "tensors a list": _described(lambda item: item.update(nested_path_to_metadata=[])),
    "a path deep": _described(lambda item: item["nested_path_to_metadata"].update({DEEP: []})),
    "a path of 5,000 digits": _described(lambda item: item["nested_path_to_metadata"].update({f"[{DIGITS}]": []})),
    "many paths with one list": _described(_repeated),
    "a shape of 2^70": _data(lambda data: data.update(global_shape=[2**70, 85])),
    "a shape of texts": _data(lambda data: data.update(global_shape=["x"])),
    "a shape of one dimension": _data(lambda data: data.update(global_shape=[36])),
    "a wider shape": _data(lambda data: data.update(global_shape=[72, 85])),
    "a dtype of nothing": _data(lambda data: data.update(dtype="torch.float31")),
    "another dtype": _data(lambda data: data.update(dtype="torch.int32")),
    "a mesh null": _data(lambda data: data.update(mesh_spec=None)),
    "a mesh of other ranks": _data(lambda data: data.update(mesh_spec={"mesh_shape": (2,), "mesh_data": (1, 2)})),
    "a mesh of one rank twice": _data(lambda data: data.update(mesh_spec={"mesh_shape": (2,), "mesh_data": (0, 0)})),
    "a mesh of 10^6 ranks": _data(
        lambda data: data.update(mesh_spec={"mesh_shape": (10**6,), "mesh_data": tuple(range(10**6))})
    ),
    "placements null": _data(lambda data: data.update(placements=None)),
    "placements partial": _data(lambda data: data.update(placements=[{"type": "Partial"}])),
    "a shard of dimension 9": _data(lambda data: data.update(placements=[{"type": "Shard", "dim": 9}])),
    "a shard of 0 parts": _data(
        lambda data: data.update(placements=[{"type": "StridedShard", "dim": 0, "split_factor": 0}])
    ),
    "a shard of dimension -1": _data(lambda data: data.update(placements=[{"type": "Shard", "dim": -1}])),
    "replicated": _data(lambda data: data.update(placements=[{"type": "Replicate"}])),
}


def _linked(root: Path) -> None:
    """A rank's file is a link to another one's, inside the directory."""
    (root / _TORCH).unlink()
    os.symlink("model_world_size_2_rank_0.pt", root / _TORCH)


CASES = [
    *(Case(f"ours: {name}", damaged("sharded", damage)) for name, damage in _SHARDED.items()),
    *(Case(f"ours: {name}", damaged("sharded", damage), damages="storages") for name, damage in _FILES.items()),
    *(Case(f"torch.save: {name}", damaged("torch-ranks", damage)) for name, damage in _TORCH_RANKS.items()),
    Case("torch.save: a rank a link to another", damaged("torch-ranks", _linked)),
    *(Case(f"items: {name}", damaged("torch-checkpointing", damage)) for name, damage in _CHECKPOINTING.items()),
    *(Case(f"safetensors: {name}", damaged("torch-huggingface", damage)) for name, damage in _TORCH_HF.items()),
]
