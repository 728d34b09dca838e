"""The bytes around a tensor in the file that `torch.save(tensor)` writes, so that the tensor itself can be moved in.

A zip archive of stored, uncompressed members (`torch.serialization`; PKZIP APPNOTE 6.3). torch keeps a checksum of each
member and does not check those of storages; they are left zero, since the data is not at hand here. Imports no torch.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass

from fsdp_shard.checkpoint.io.dtypes import TensorSpec, torch_name
from fsdp_shard.checkpoint.torch_pickle.pickler import Call, Global, Persistent, dumps

_ALIGNMENT = 64  # as torch aligns storages, so that they can be mapped
_LIMIT = 0xFFFFFFFF  # from here on a size or position needs its 8-byte form (zip64)
_VERSION, _VERSION_64 = 20, 45
_UTF8 = 0x800

# Types that had a storage class of their own before untyped storages came; torch still writes those names.
_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "C64": "ComplexFloatStorage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}


@dataclass(frozen=True)
class Item:
    """The frame of one saved tensor: what comes before its bytes, and what comes after them."""

    before: bytes
    after: bytes


def frame(spec: TensorSpec) -> Item:
    """The frame of a contiguous tensor of this dtype and shape."""
    members = [("archive/data.pkl", _tensor_pickle(spec)), ("archive/byteorder", b"little")]
    before, records = b"", []
    for name, data in members:
        records.append(_record(name, len(data), zlib.crc32(data), len(before)))
        before += _local(name, len(data), zlib.crc32(data), b"") + data
    name, at = "archive/data/0", len(before)
    records.append(_record(name, spec.num_bytes, 0, at))
    before += _local(name, spec.num_bytes, 0, _padding(at, name, spec.num_bytes))
    position = len(before) + spec.num_bytes
    name, data = "archive/version", b"3\n"
    records.append(_record(name, len(data), zlib.crc32(data), position))
    after = _local(name, len(data), zlib.crc32(data), b"") + data
    return Item(before, after + _end(records, position + len(after)))


def _tensor_pickle(spec: TensorSpec) -> bytes:
    """What `torch.save` pickles for a tensor: a call that rebuilds it from a view of storage 0."""
    typed = _STORAGES.get(spec.dtype)
    storage = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    size = spec.num_elements if typed else spec.num_bytes
    hooks = Call(Global("collections", "OrderedDict"), ())
    view = (Persistent(("storage", storage, "0", "cpu", size)), 0, spec.shape, _strides(spec.shape), False, hooks)
    if typed:
        return dumps(Call(Global("torch._utils", "_rebuild_tensor_v2"), view))
    return dumps(Call(Global("torch._utils", "_rebuild_tensor_v3"), (*view, Global("torch", torch_name(spec.dtype)))))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [max(size, 1) for size in shape[:0:-1]]
    return tuple(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))[::-1] if shape else ()


def _padding(at: int, name: str, num_bytes: int) -> bytes:
    """An extra field (id `FB`, as torch's) after which the data begins at a multiple of the alignment."""
    start = at + len(_local(name, num_bytes, 0, b"")) + 4
    size = -start % _ALIGNMENT
    return struct.pack("<2sH", b"FB", size) + b"Z" * size


def _local(name: str, num_bytes: int, crc: int, extra: bytes) -> bytes:
    """The header in front of a member."""
    is_large = num_bytes >= _LIMIT
    if is_large:
        extra = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) + extra
    version, size = (_VERSION_64, _LIMIT) if is_large else (_VERSION, num_bytes)
    head = struct.pack("<4s5H3I2H", b"PK\3\4", version, _UTF8, 0, 0, 0x21, crc, size, size, len(name), len(extra))
    return head + name.encode() + extra


def _record(name: str, num_bytes: int, crc: int, at: int) -> bytes:
    """The entry of a member in the directory at the end."""
    extra = b""
    size, place = num_bytes, at
    if num_bytes >= _LIMIT or at >= _LIMIT:
        extra = struct.pack("<HHQQQ", 1, 24, num_bytes, num_bytes, at)
        size = place = _LIMIT
    version = _VERSION_64 if extra else _VERSION
    sizes = (crc, size, size, len(name), len(extra))
    head = struct.pack("<4s6H3I5H2I", b"PK\1\2", version, version, _UTF8, 0, 0, 0x21, *sizes, 0, 0, 0, 0, place)
    return head + name.encode() + extra


def _end(records: list[bytes], at: int) -> bytes:
    """The directory and what marks its place."""
    directory, count = b"".join(records), len(records)
    large = b""
    place = at
    if at >= _LIMIT:
        end = at + len(directory)
        large = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), at)
        large += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        place = _LIMIT
    return directory + large + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), place, 0)
