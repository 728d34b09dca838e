"""Reads a large `.metadata` of DCP with Python's own unpickler, in a process that can be ended, as a table.

The machine of `unpickler` takes eight times as long: it checks each opcode, since `pickle.Unpickler` can be made to
take all memory or to end its process. So that one runs in a fork under limits of memory and time. It finds bare classes
only, which do nothing, and hands back texts and whole numbers. Whatever it refuses, or does not know, the machine
reads, which also says what is wrong.
"""

from __future__ import annotations

import gc
import io
import pickle
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from fsdp_shard.checkpoint.torch_pickle.allow_list import torch_constants
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import DCP_CLASSES, Constant, counts, text
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import run_limited

LARGE_BYTES = 1 << 20  # of a smaller one, a fork takes longer than the machine


_MANY = 1000
# Name, dtype and shape of a tensor; offsets and shape of each piece; file, first byte and bytes of each.
_Row = tuple[str, str, tuple[int, ...], "array[int]", "array[int]"]
Keys = dict[str, tuple[object, ...]]


class Item(NamedTuple):
    """The bytes of a piece: its file, the first one, and their number."""

    file: str
    offset: int
    num_bytes: int


class TensorTable(NamedTuple):
    """A tensor: torch's name of its dtype, its shape, and the offsets, the shape and the item of each piece.

    A piece of which the metadata does not say where it is has no item.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], Item | None]]


class MetadataTable(NamedTuple):
    """What a `.metadata` says: its tensors, the keys of each in the nested state dict, and the number of its items.

    `excess` is the number of pieces, if there are so many more of them than items that the tensors are not listed.
    """

    tensors: dict[str, TensorTable]
    keys: Keys | None
    num_items: int
    excess: int = 0


def read_large_metadata(data: bytes, where: str) -> MetadataTable | None:
    """The table in the pickle `data`, of the file `where`; None if it has to be read by the machine."""
    try:
        found = run_limited(
            lambda: _flatten(data), f"reading {where}", len(data), kind="unpickle", error=CheckpointError
        )
    except CheckpointError:
        return None
    if found is None:
        return None
    tensors, keys, num_items, files, excess = found
    return MetadataTable({row[0]: _table(row, files) for row in tensors}, keys, num_items, excess)


def excess_of(num_pieces: int, num_items: int) -> int:
    """`num_pieces`, if it is far above `num_items`: of a few that are missing, the first is named when it is read."""
    return num_pieces if num_pieces > _MANY + num_items else 0


def _table(row: _Row, files: list[str]) -> TensorTable:
    _, dtype, shape, numbers, places = row
    boxes = _tuples(numbers, len(shape)) if shape else iter([()] * (2 * len(places) // 3))
    items = (
        None if number < 0 else Item(files[number], offset, num_bytes)
        for number, offset, num_bytes in zip(*[iter(places)] * 3, strict=True)
    )
    return TensorTable(dtype, shape, list(zip(boxes, boxes, items, strict=True)))


def _tuples(numbers: array[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(numbers)] * width, strict=True)


# In the process that can be ended.


class _Bare:
    """An object of any class of DCP's: what the pickle sets on it is in its `__dict__`."""


class _Properties(_Bare):
    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class _Nothing(_Bare):
    """What is of no use: the member of an enum, such as a memory format, or the path that was saved to."""

    def __init__(self, *arguments: Any) -> None:
        """Drop them."""


_BARE: dict[tuple[str, str], Any] = {key: type(key[1], (_Bare,), {}) for key in DCP_CLASSES}
_METADATA = "torch.distributed.checkpoint.metadata"
_BARE |= {
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Nothing,
    (_METADATA, "StorageMeta"): _Bare,
    **{(module, "PosixPath"): _Nothing for module in ("pathlib", "pathlib._local")},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Nothing,
}
_TENSOR, _BYTES = _BARE[_METADATA, "TensorStorageMetadata"], _BARE[_METADATA, "BytesStorageMetadata"]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _BARE.get((module, name)) or torch_constants().get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a storage")


def _flatten(data: bytes) -> tuple[list[_Row], Keys | None, int, list[str], int] | None:
    """The columns of the table; None if the machine has to read it."""
    gc.disable()  # this process ends with the work, and no object in it is to be freed before
    try:
        stream = io.BytesIO(data)
        metadata = _Unpickler(stream).load().__dict__
        if stream.tell() != len(data):
            return None
        files: dict[str, int] = {}
        stored = _stored(metadata["storage_data"], files)
        rows: list[_Row] = []
        items = metadata["state_dict_metadata"].items()
        excess = excess_of(sum(len(item.chunks) for _, item in items if type(item) is _TENSOR), len(stored))
        for key, item in items if not excess else ():
            if type(item) is _TENSOR:
                rows.append(_row(text(key), item.__dict__, stored))
            elif type(item) is not _BYTES or not isinstance(key, str):
                return None
        return rows, _keys(metadata.get("planner_data")), len(stored), list(files), excess
    except MemoryError:
        raise
    except Exception:  # of a pickle from anywhere: the machine says what is wrong with it
        return None


def _stored(storage: Any, files: dict[str, int]) -> dict[Any, tuple[int, int, int]]:
    """(name, offsets) of a piece -> the number of its file, its first byte and its bytes."""
    found = {}
    for key, info in storage.items():
        place, where = info.__dict__, key.__dict__
        if place.get("transform_descriptors"):
            raise ValueError("compressed")
        number = files.setdefault(text(place["relative_path"]), len(files))
        found[where["fqn"], where.get("offset")] = (number, place["offset"], place["length"])
    return found


def _row(key: str, tensor: dict[str, Any], stored: dict[Any, tuple[int, int, int]]) -> _Row:
    shape, dtype = counts(tensor["size"]), tensor["properties"].dtype
    if not isinstance(dtype, Constant):
        raise TypeError("no dtype")
    numbers, places = array("q"), array("q")
    for chunk in tensor["chunks"]:
        box = chunk.__dict__
        offsets, sizes = box["offsets"], box["sizes"]
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError("a piece of other dimensions")
        numbers.extend(offsets)  # whole numbers of 64 bits, or an error
        numbers.extend(sizes)
        places.extend(stored.get((key, offsets), (-1, 0, 0)))
    if min(numbers, default=0) < 0 or min(places, default=0) < -1:
        raise ValueError("a negative size")
    return key, str(dtype), shape, numbers, places


def _keys(planner_data: Any) -> Keys | None:
    if not planner_data:
        return None
    for key, path in planner_data.items():
        if not isinstance(key, str) or type(path) is not tuple or not all(type(part) in (str, int) for part in path):
            raise TypeError("keys of another kind")
    return dict(planner_data)
