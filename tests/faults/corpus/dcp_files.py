"""DCP: .metadata that lies about shapes, pieces, places and items, and files that do not hold what it says."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.checkpoint.formats import damaged_dcp
from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_NAME = "model.model.layers.0.mlp.down_proj.weight"
_DATA = "__0_0.distcp"


def _stored(**changes: Any) -> Damage:
    """Where the tensor lies, with other values."""

    def change(metadata: Metadata) -> None:
        key = next(key for key in metadata.storage_data if key.fqn == _NAME)
        metadata.storage_data[key] = dataclasses.replace(metadata.storage_data[key], **changes)

    return edits.metadata(change)


def _index(**changes: Any) -> Damage:
    """Which piece of which tensor lies there, with other values."""

    def change(metadata: Metadata) -> None:
        key = next(key for key in metadata.storage_data if key.fqn == _NAME)
        metadata.storage_data[dataclasses.replace(key, **changes)] = metadata.storage_data.pop(key)

    return edits.metadata(change)


def _tensor(change: Callable[[Any], object]) -> Damage:
    return edits.metadata(lambda metadata: change(metadata.state_dict_metadata[_NAME]) and None)


def _attribute(name: str, value: Any) -> Damage:
    return _tensor(lambda tensor: setattr(tensor, name, value))


def _chunk(**changes: Any) -> Damage:
    def change(tensor: Any) -> None:
        tensor.chunks[0] = dataclasses.replace(tensor.chunks[0], **changes)

    return _tensor(change)


def _put(value: Any) -> Damage:
    return edits.metadata(lambda metadata: metadata.state_dict_metadata.__setitem__(_NAME, value))


def _itself(metadata: Metadata) -> None:
    entries: dict[str, Any] = metadata.state_dict_metadata
    entries["again"] = entries


def _zeros(root: Path) -> None:
    data = bytearray((root / _DATA).read_bytes())
    start = data.index(b"_rebuild_tensor")  # in the pickle of the first tensor
    data[start : start + 60] = bytes(60)
    (root / _DATA).write_bytes(data)


def _protocol(number: int) -> Damage:
    return lambda root: (root / ".metadata").write_bytes(
        pickle.dumps(pickle.loads((root / ".metadata").read_bytes()), protocol=number)
    )


_REFUSED: dict[str, Damage] = {
    "metadata: a list": lambda root: (root / ".metadata").write_bytes(pickle.dumps([1])),
    "metadata: none": edits.gone(".metadata"),
    "metadata: a FIFO": edits.fifo(".metadata"),
    "metadata: a directory": edits.directory(".metadata"),
    "metadata: its tensors null": edits.metadata(lambda m: setattr(m, "state_dict_metadata", None)),
    "metadata: its tensors a list": edits.metadata(lambda m: setattr(m, "state_dict_metadata", [1])),
    "metadata: no tensors": edits.metadata(lambda m: m.state_dict_metadata.clear()),
    "metadata: its places a list": edits.metadata(lambda m: setattr(m, "storage_data", [1])),
    "metadata: places of texts": edits.metadata(lambda m: setattr(m, "storage_data", {_NAME: "there"})),
    "metadata: a name that is a number": edits.metadata(
        lambda m: m.state_dict_metadata.__setitem__(7, m.state_dict_metadata.pop(_NAME))
    ),
    "metadata: a tensor that is a text": _put("tensor"),
    "metadata: a tensor that is null": _put(None),
    "shape: negative": _attribute("size", [-36, 85]),
    "shape: of texts": _attribute("size", ["36", "85"]),
    "shape: a number": _attribute("size", 3060),
    "shape: null": _attribute("size", None),
    "shape: of 2^70": _attribute("size", [2**70, 85]),
    "shape: larger": _attribute("size", torch.Size([72, 85])),
    "shape: of one dimension": _attribute("size", torch.Size([3060])),
    "dtype: another": _tensor(lambda t: setattr(t.properties, "dtype", torch.float64)),
    "dtype: a text": _tensor(lambda t: setattr(t.properties, "dtype", "float32")),
    "dtype: null": _tensor(lambda t: setattr(t.properties, "dtype", None)),
    "chunks: null": _attribute("chunks", None),
    "chunks: a text": _attribute("chunks", "all"),
    "chunks: of numbers": _attribute("chunks", [1, 2]),
    "chunks: none": _attribute("chunks", []),
    "chunks: twice": _tensor(lambda t: t.chunks.append(t.chunks[0])),
    "chunk: negative offset": _chunk(offsets=[0, -1]),
    "chunk: offsets of one dimension": _chunk(offsets=torch.Size([0])),
    "chunk: offsets of texts": _chunk(offsets=["0", "0"]),
    "chunk: sizes of texts": _chunk(sizes=["36", "85"]),
    "chunk: sizes larger": _chunk(sizes=torch.Size([36, 90])),
    "chunk: sizes smaller": _chunk(sizes=torch.Size([36, 80])),
    "chunk: sizes of 2^62": _chunk(sizes=torch.Size([2**62, 85])),
    "place: file up and out": _stored(relative_path="../secret"),
    "place: file absolute": _stored(relative_path="/etc/hostname"),
    "place: file a number": _stored(relative_path=7),
    "place: file null": _stored(relative_path=None),
    "place: file empty": _stored(relative_path=""),
    "place: file missing": _stored(relative_path="__9_9.distcp"),
    "place: file the metadata": _stored(relative_path=".metadata"),
    "place: negative offset": _stored(offset=-1),
    "place: offset a text": _stored(offset="0"),
    "place: offset fractional": _stored(offset=0.5),
    "place: offset beyond": _stored(offset=10**12),
    "place: offset of 2^80": _stored(offset=2**80),
    "place: offset inside": _stored(offset=100),
    "place: length 0": _stored(length=0),
    "place: negative length": _stored(length=-5),
    "place: length a text": _stored(length="all"),
    "place: length beyond": _stored(length=10**12),
    "place: a transform": _stored(transform_descriptors=["gzip"]),
    "index: of another tensor": _index(fqn="model.model.norm.weight"),
    "index: of no tensor": _index(fqn="nothing"),
    "index: name a number": _index(fqn=7),
    "index: another offset": _index(offset=torch.Size([1, 0])),
    "data: cut short": edits.cut(_DATA, 5000),
    "data: empty": edits.content(_DATA, b""),
    "data: gone": edits.gone(_DATA),
    "data: a FIFO": edits.fifo(_DATA),
    "data: zeros in a header": _zeros,
}
_EITHER: dict[str, Damage] = {
    "metadata: in itself": edits.metadata(_itself),
    "metadata: no version": edits.metadata(lambda m: m.__dict__.pop("version", None) and None),
    "metadata: a strange version": edits.metadata(lambda m: setattr(m, "version", [1])),
    "metadata: planner data of texts": edits.metadata(lambda m: setattr(m, "planner_data", "x")),
    "metadata: planner data of paths that are none": edits.metadata(
        lambda m: setattr(m, "planner_data", {key: [1] for key in m.planner_data or {}})
    ),
    "metadata: a storage meta": edits.metadata(lambda m: setattr(m, "storage_meta", "x")),
    "metadata: a tensor that is bytes": _put(BytesStorageMetadata()),
    "index: no number": _index(index=None),
    "index: number a text": _index(index="x"),
    "requires_grad a text": _tensor(lambda t: setattr(t.properties, "requires_grad", "x")),
    "layout a text": _tensor(lambda t: setattr(t.properties, "layout", "x")),
}


def _small(damage: Damage) -> Callable[[Path], object]:
    """A case of tests/checkpoint."""
    return lambda root: damage(damaged_dcp.saved(root))


CASES = [
    *(Case(f"small: {name}", _small(damage)) for name, (damage, _) in damaged_dcp.CASES.items()),
    *(Case(name, damaged("dcp", damage)) for name, damage in _REFUSED.items()),
    *(Case(name, damaged("dcp", damage), expect="any") for name, damage in _EITHER.items()),
    *(Case(f"protocol {number}", damaged("dcp", _protocol(number)), expect="accepted") for number in (2, 3, 5)),
    *(Case(f"protocol {number}", damaged("dcp", _protocol(number)), expect="any") for number in (0, 1)),
]
