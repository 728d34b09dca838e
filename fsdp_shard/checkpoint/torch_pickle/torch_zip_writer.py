"""Makes the bytes around a tensor in a file of `torch.save(tensor)`, into which the tensor is copied later.

The file is a zip archive of uncompressed members (`torch.serialization`; PKZIP APPNOTE 6.3). torch writes a checksum of
each member but does not check those of storages: they are zero here, as the data is not known yet. Imports no torch.
"""

import struct
import zlib

from fsdp_shard.checkpoint.io import TensorSpec, torch_name
from fsdp_shard.checkpoint.tensor_slices import row_major_strides
from fsdp_shard.checkpoint.torch_pickle.pickler import Call, Global, Persistent, dumps
from fsdp_shard.checkpoint.torch_pickle.tensor import TYPED_STORAGES

_ALIGNMENT = 64  # as torch aligns storages, so that they can be mapped
_LIMIT = 0xFFFFFFFF  # sizes and positions from this value on take 8 bytes (zip64)
_VERSION, _VERSION_64 = 20, 45
_UTF8 = 0x800

_STORAGE_NAMES = {dtype: name for name, dtype in TYPED_STORAGES.items()}


def frame(spec: TensorSpec) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a contiguous tensor of this dtype and shape."""
    records: list[bytes] = []
    before = _member(records, 0, "archive/data.pkl", _tensor_pickle(spec))
    before += _member(records, len(before), "archive/byteorder", b"little")
    name, at = "archive/data/0", len(before)
    records.append(_record(name, spec.num_bytes, 0, at))
    before += _local(name, spec.num_bytes, 0, _padding(at, name, spec.num_bytes))
    end = len(before) + spec.num_bytes
    after = _member(records, end, "archive/version", b"3\n")
    return before, after + _end(records, end + len(after))


def _member(records: list[bytes], at: int, name: str, data: bytes) -> bytes:
    """Return a member at byte `at`; its entry of the central directory is appended to `records`."""
    crc = zlib.crc32(data)
    records.append(_record(name, len(data), crc, at))
    return _local(name, len(data), crc, b"") + data


def _tensor_pickle(spec: TensorSpec) -> bytes:
    """Return the pickle of `torch.save` for a tensor: a call that rebuilds it as a view of storage 0."""
    typed = _STORAGE_NAMES.get(spec.dtype)
    storage = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    size = spec.num_elements if typed else spec.num_bytes
    hooks = Call(Global("collections", "OrderedDict"), ())
    strides = row_major_strides(spec.shape)
    view = (Persistent(("storage", storage, "0", "cpu", size)), 0, spec.shape, strides, False, hooks)
    if typed:
        return dumps(Call(Global("torch._utils", "_rebuild_tensor_v2"), view))
    return dumps(Call(Global("torch._utils", "_rebuild_tensor_v3"), (*view, Global("torch", torch_name(spec.dtype)))))


def _padding(at: int, name: str, num_bytes: int) -> bytes:
    """Return an extra field (id `FB`, as torch's) that aligns the data after it."""
    start = at + len(_local(name, num_bytes, 0, b"")) + 4
    size = -start % _ALIGNMENT
    return struct.pack("<2sH", b"FB", size) + b"Z" * size


def _local(name: str, num_bytes: int, crc: int, extra: bytes) -> bytes:
    """Return the header in front of a member."""
    is_large = num_bytes >= _LIMIT
    if is_large:
        extra = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) + extra
    version, size = (_VERSION_64, _LIMIT) if is_large else (_VERSION, num_bytes)
    head = struct.pack("<4s5H3I2H", b"PK\3\4", version, _UTF8, 0, 0, 0x21, crc, size, size, len(name), len(extra))
    return head + name.encode() + extra


def _record(name: str, num_bytes: int, crc: int, at: int) -> bytes:
    """Return the entry of a member in the directory at the end."""
    extra = b""
    size, offset = num_bytes, at
    if num_bytes >= _LIMIT or at >= _LIMIT:
        extra = struct.pack("<HHQQQ", 1, 24, num_bytes, num_bytes, at)
        size = offset = _LIMIT
    version = _VERSION_64 if extra else _VERSION
    sizes = (crc, size, size, len(name), len(extra))
    head = struct.pack("<4s6H3I5H2I", b"PK\1\2", version, version, _UTF8, 0, 0, 0x21, *sizes, 0, 0, 0, 0, offset)
    return head + name.encode() + extra


def _end(records: list[bytes], at: int) -> bytes:
    """Return the central directory and the records that locate it."""
    directory, count = b"".join(records), len(records)
    large = b""
    offset = at
    if at >= _LIMIT:
        end = at + len(directory)
        large = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), at)
        large += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        offset = _LIMIT
    return directory + large + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), offset, 0)
