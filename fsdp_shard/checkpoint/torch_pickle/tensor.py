"""Tensors as torch.save writes them: where they lie, from what torch's own functions would rebuild them from. Not read.

Each function here takes what torch's function of the same name takes (torch/_utils.py, torch/_tensor.py of 2.13) and
says where the tensor lies instead. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsdp_shard.checkpoint.io import dtypes
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import Constant, count, counts


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that tensors share: from byte `start` of the file on. `dtype` is None where only the tensors say it."""

    start: int
    num_bytes: int
    dtype: str | None
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: safetensors dtype, shape and strides in elements, `start` the byte of its first element."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A tensor that is there, but has no bytes that could be taken as they are: `problem` goes after its name."""

    problem: str


_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
# Storages whose tensors cannot be kept in safetensors, with the bytes of an element.
_ODD_STORAGES = {"ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4}
_ODD_STORAGES |= {"QUInt4x2Storage": 1, "QUInt2x4Storage": 1}
STORAGE_NAMES = (*_STORAGES, *_ODD_STORAGES)


def storage_reference(identifier: Any) -> tuple[str, str | None, int]:
    """(key, dtype or None if untyped, bytes) of a persistent id `("storage", type, key, location, elements, ...)`."""
    if not isinstance(identifier, tuple) or len(identifier) not in (5, 6) or identifier[0] != "storage":
        raise TypeError("a persistent id is not that of a storage")
    _, kind, key, _, elements, *view = identifier
    if not isinstance(kind, Constant) or not isinstance(key, str):
        raise TypeError("a storage has no type or no key")
    if view not in ([], [None]):
        raise TypeError("a storage is a view of another one, as PyTorch before 0.4 wrote them")
    name = kind.rpartition(".")[2]
    if name in _STORAGES:
        return key, _STORAGES[name], count(elements) * dtypes.itemsize(_STORAGES[name])
    if name in _ODD_STORAGES:
        return key, name.removesuffix("Storage"), count(elements) * _ODD_STORAGES[name]
    if name != "UntypedStorage":
        raise TypeError(f"{kind[:100]} is no type of storage")
    return key, None, count(elements)


def rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, metadata: Any = None
) -> StoredTensor | Unreadable:
    """`torch._utils._rebuild_tensor_v2` (and `_rebuild_tensor`): a strided view of a typed storage."""
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    return _view(storage, storage.dtype or "U8", offset, size, stride, metadata)


def rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor | Unreadable:
    """`torch._utils._rebuild_tensor_v3`: a view of an untyped storage, for dtypes that came after the typed ones."""
    if not isinstance(storage, Storage) or not isinstance(dtype, Constant):
        raise TypeError("a tensor without a storage or a dtype")
    name = dtypes.find_torch_name(dtype)
    if name is None:
        return Unreadable(f"has the dtype {dtype.removeprefix('torch.')}, which safetensors cannot hold")
    return _view(storage, name, offset, size, stride, metadata)


def _view(
    storage: Storage, dtype: str, offset: Any, size: Any, stride: Any, metadata: Any
) -> StoredTensor | Unreadable:
    offset, shape, strides = count(offset), counts(size), counts(stride)
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    if metadata:
        return Unreadable("is conjugated or negated lazily; save it after resolve_conj() and resolve_neg()")
    if not dtypes.is_known(dtype):
        return Unreadable(f"is stored as {dtype}, which safetensors cannot hold")
    item = dtypes.itemsize(dtype)
    extent = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    if extent * item > storage.num_bytes:
        raise ValueError(
            f"a tensor of shape {list(shape)} reaches to byte {extent * item} of the storage {storage.key[:50]}, which "
            f"has {storage.num_bytes}"
        )
    return StoredTensor(dtype, shape, strides, storage.start + (offset * item if extent else 0))


def rebuild_unreadable(problem: str) -> Any:
    """A stand-in for a function that rebuilds a kind of tensor that has no plain bytes."""
    return lambda *arguments, **keywords: Unreadable(problem)
