"""The stream format of torch.save before 1.6, and still with `_use_new_zipfile_serialization=False`.

It consists of pickles of a magic number, a version, the machine, the object and its storage keys, and then, for each
storage, the number of its elements and their bytes. Source: `_legacy_save` and `_legacy_load` in torch/serialization.py
(2.13).
"""

import os
from typing import Any

from fsdp_shard.checkpoint.io import is_known, itemsize
from fsdp_shard.checkpoint.torch_pickle.allow_list import load_from
from fsdp_shard.checkpoint.torch_pickle.tensor import Storage, storage_reference
from fsdp_shard.checkpoint.torch_pickle.unpickler import CutShort
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import limits

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_FIRST_READ = 1 << 20


_Head = tuple[Any, list[str], int]
"""The pickled part: the object, the keys of its storages in file order, and the end of the part."""


def read_stream(descriptor: int, start: int, num_bytes: int, where: str) -> Any:
    """Return the object in bytes [start, start + num_bytes) of an open file; errors begin with `where`."""
    sizes: dict[str, tuple[int, int]] = {}  # key -> (bytes, bytes per element)
    (value, keys, end), data = _read_head(descriptor, start, num_bytes, where, sizes)
    if not keys:
        return value
    positions, at = {}, start + end
    for key in keys:
        length, item = sizes.get(key, (0, 1))
        stored = int.from_bytes(os.pread(descriptor, 8, at), "little", signed=True)
        if stored * item != length or at + 8 + length > start + num_bytes:
            raise CheckpointError(
                f"{where} has storage {key[:100]!r} at byte {at}, with {stored} elements of {item} bytes where its "
                f"tensors need {length} bytes: the file is damaged or cut short."
            )
        positions[key] = at + 8
        at += 8 + length
    if at != start + num_bytes:
        raise CheckpointError(f"{where} has {start + num_bytes - at} bytes after its last storage.")
    # The positions of storages are known only after the object that refers to them, so the object is read twice.
    return _parse(data, where, positions, sizes)[0]


def _read_head(
    descriptor: int, start: int, num_bytes: int, where: str, sizes: dict[str, tuple[int, int]]
) -> tuple[_Head, bytes]:
    """Read increasing parts of the file until the pickles are complete, as their length is not stored."""
    most = min(num_bytes, limits().metadata_bytes)
    count = min(_FIRST_READ, most)
    while True:
        data = os.pread(descriptor, count, start)
        try:
            return _parse(data, where, {}, sizes), data
        except CutShort:
            if count == most:
                raise
        count = min(8 * count, most)


def _parse(data: bytes, where: str, positions: dict[str, int], sizes: dict[str, tuple[int, int]]) -> _Head:
    def find(identifier: Any) -> Storage:
        key, dtype, length = storage_reference(identifier)
        item = itemsize(dtype) if dtype is not None and is_known(dtype) else 1
        sizes.setdefault(key, (length, item))
        return Storage(positions.get(key, 0), sizes[key][0], dtype, key)

    magic, end = load_from(data, 0, where)
    if magic != _MAGIC:
        raise CheckpointError(f"{where} is a plain pickle, not a file of torch.save.")
    version, end = load_from(data, end, where)
    machine, end = load_from(data, end, where)
    if version != _PROTOCOL or not isinstance(machine, dict):
        raise CheckpointError(f"{where} is of a version of torch.save's stream that is not known.")
    if machine.get("little_endian") is not True:
        raise CheckpointError(f"{where} was saved with big-endian byte order; only little-endian files are read.")
    value, end = load_from(data, end, where, find)
    keys, end = load_from(data, end, where)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise CheckpointError(f"{where} has no list of its storages after its pickle.")
    if missing := sizes.keys() - set(keys):
        raise CheckpointError(f"{where} has no storage {min(missing)[:100]!r}, but a tensor needs it.")
    return value, keys, end
