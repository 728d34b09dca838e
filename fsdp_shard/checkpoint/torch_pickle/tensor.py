"""Finds byte range, dtype, shape and strides of each tensor in a torch.save pickle, without reading the tensor.

Each `rebuild_*` function accepts the arguments of torch's function of the same name (torch/_utils.py, torch/_tensor.py
of 2.13), but returns the tensor's position in its file instead of the tensor. Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Any

from fsdp_shard.checkpoint.io import find_torch_name, is_known, itemsize
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import Constant, count, counts, instance_of
from fsdp_shard.checkpoint.torch_pickle.zip_reader import Member


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of which tensors are views, from byte `start` of the file. `dtype` is None if it is untyped.

    `member` is the archive member that holds it, if there is an archive.
    """

    start: int
    num_bytes: int
    dtype: str | None
    key: str
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: safetensors dtype, shape and strides in elements, `start` the byte of its first element.

    `member` is the archive member that holds its storage, if there is an archive.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    member: Member | None = None

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A tensor whose stored bytes cannot be used directly; `problem` follows its name in messages."""

    problem: str


# Typed storages preceded untyped ones; torch still writes their names for the older dtypes.
TYPED_STORAGES = {
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
# Storages of dtypes that safetensors lacks -> bytes per element.
_ODD_STORAGES = {"ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4}
_ODD_STORAGES |= {"QUInt4x2Storage": 1, "QUInt2x4Storage": 1}
STORAGE_NAMES = (*TYPED_STORAGES, *_ODD_STORAGES)


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
    if name in TYPED_STORAGES:
        return key, TYPED_STORAGES[name], count(elements) * itemsize(TYPED_STORAGES[name])
    if name in _ODD_STORAGES:
        return key, name.removesuffix("Storage"), count(elements) * _ODD_STORAGES[name]
    if name != "UntypedStorage":
        raise TypeError(f"{kind[:100]} is not a type of storage")
    return key, None, count(elements)


def rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, metadata: Any = None
) -> StoredTensor | Unreadable:
    """`torch._utils._rebuild_tensor_v2` (and `_rebuild_tensor`): a strided view of a typed storage."""
    return _view(instance_of(Storage, storage), None, offset, size, stride, metadata)


def rebuild_tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor | Unreadable:
    """`torch._utils._rebuild_tensor_v3`: a view of an untyped storage, for dtypes newer than the typed ones.

    `rest` are requires_grad, backward_hooks, dtype and (optional) metadata.
    """
    _, _, dtype, metadata = rest if len(rest) == 4 else (*rest, None)
    name = find_torch_name(instance_of(Constant, dtype))
    if name is None:
        return Unreadable(f"has the dtype {dtype.removeprefix('torch.')}, which safetensors cannot hold")
    return _view(instance_of(Storage, storage), name, offset, size, stride, metadata)


def _view(
    storage: Storage, dtype: str | None, offset: Any, size: Any, stride: Any, metadata: Any
) -> StoredTensor | Unreadable:
    """Return a view of a storage, with the storage's dtype if `dtype` is None."""
    dtype = dtype or storage.dtype or "U8"
    offset, shape, strides = count(offset), counts(size), counts(stride)
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    if metadata:
        return Unreadable("is conjugated or negated lazily; save it after resolve_conj() and resolve_neg()")
    if not is_known(dtype):
        return Unreadable(f"is stored as {dtype}, which safetensors cannot hold")
    item = itemsize(dtype)
    extent = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    if extent * item > storage.num_bytes:
        raise ValueError(
            f"a tensor of shape {list(shape)} ends at byte {extent * item} of the storage {storage.key[:50]}, which "
            f"has {storage.num_bytes}"
        )
    return StoredTensor(dtype, shape, strides, storage.start + (offset * item if extent else 0), storage.member)


def rebuild_unreadable(problem: str) -> Any:
    """Return a stand-in for a torch function that rebuilds tensors without plain bytes."""
    return lambda *arguments, **keywords: Unreadable(problem)
