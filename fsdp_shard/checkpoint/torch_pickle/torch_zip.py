"""Reads torch.save files without torch: their objects, and the byte range of each tensor.

Tensors become `StoredTensor` and similar classes (see `tensor`, `dtensor`), everything else plain Python values or
inert stand-ins. No weights are read. Sources: torch/serialization.py and caffe2/serialize/inline_container.cc (2.13).
"""

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.torch_pickle.allow_list import load
from fsdp_shard.checkpoint.torch_pickle.legacy_stream import read_stream
from fsdp_shard.checkpoint.torch_pickle.tensor import Storage, storage_reference
from fsdp_shard.checkpoint.torch_pickle.zip_reader import read_members
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular, read_range

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def is_torch_file(path: Path) -> bool:
    """Whether `path` is a regular file that begins like a torch.save file; never raises."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            start = file.read(len(_ZIP))
    except (CheckpointError, OSError):
        return False
    return start == _ZIP or start[:1] == _PICKLE


def read_torch_file(path: Path) -> Any:
    """Return the object that torch.save wrote to `path`; raise CheckpointError, which names the file, for any error."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            return read_torch_bytes(file.fileno(), 0, os.fstat(file.fileno()).st_size, str(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def read_torch_bytes(descriptor: int, start: int, num_bytes: int, where: str) -> Any:
    """Like `read_torch_file`, for bytes [start, start + num_bytes) of an open file, such as a `.distcp` item.

    Tensor positions are relative to the whole file. Messages begin with `where`.
    """
    head = os.pread(descriptor, min(len(_ZIP), num_bytes), start)
    if head == _ZIP:
        return _read_zip(descriptor, start, num_bytes, where)
    if head[:1] == _PICKLE:
        return read_stream(descriptor, start, num_bytes, where)
    problem = "is empty" if not num_bytes else "begins as no file of torch.save does"
    raise CheckpointError(f"{where} {problem}: neither a zip archive nor torch's older stream.")


# The zip archive: NAME/data.pkl, NAME/data/KEY for each storage, NAME/byteorder.


def _read_zip(descriptor: int, start: int, num_bytes: int, where: str) -> Any:
    members = read_members(descriptor, start, num_bytes, where)
    top = next(iter(members), "").partition("/")[0]
    if f"{top}/data.pkl" not in members:
        raise CheckpointError(f"{where} is a zip archive, but not one of torch.save: it has no data.pkl.")
    order = members.get(f"{top}/byteorder")
    if order is not None and (text := os.pread(descriptor, min(order.num_bytes, 16), order.start)) != b"little":
        raise CheckpointError(f"{where} was saved with byte order {text!r}; only little-endian files are read.")
    storages: dict[str, Storage] = {}

    def find(identifier: Any) -> Storage:
        key, dtype, size = storage_reference(identifier)
        if key not in storages:
            member = members.get(f"{top}/data/{key}")
            if member is None:
                raise CheckpointError(f"has no storage {key[:100]!r}, but a tensor needs it")
            if size > member.num_bytes:
                raise CheckpointError(f"has {member.num_bytes} bytes of storage {key!r}, but a tensor needs {size}")
            storages[key] = Storage(member.start, member.num_bytes, dtype, key, member)
        known = storages[key]
        return known if known.dtype == dtype else replace(known, dtype=dtype)

    pickled = members[f"{top}/data.pkl"]
    data = read_range(descriptor, pickled.start, pickled.num_bytes, f"the pickle in {where}", "metadata_bytes")
    if pickled.crc and zlib.crc32(data) != pickled.crc:
        raise CheckpointError(
            f"{where}, bytes {pickled.start}-{pickled.start + pickled.num_bytes - 1}: what describes the tensors does "
            f"not have the CRC32 that was written with it, so the file is damaged."
        )
    return load(data, where, find)
