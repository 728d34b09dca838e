"""Element types by their safetensors names: sizes, and torch's names. Imports torch only in `to_torch`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fsdp_shard.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# safetensors name -> (bytes of an element, torch's attribute). Sub-byte types (F4, F6) have no flat byte ranges.
_DTYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "C64": (8, "complex64"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
_FROM_TORCH = {torch_name: name for name, (_, torch_name) in _DTYPES.items()}

CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""The types that a `dtype=` setting casts; integers, booleans, 8-bit floats and complex numbers keep their type."""


def is_known(dtype: str) -> bool:
    """Whether this is the safetensors name of a type with whole bytes."""
    return dtype in _DTYPES


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return _DTYPES[dtype][0]


def torch_name(dtype: str) -> str:
    """`BF16` -> `bfloat16`, as torch and config.json write it."""
    return _DTYPES[dtype][1]


@cache
def from_torch_name(name: str) -> str:
    """`bfloat16` or `torch.bfloat16` -> `BF16`."""
    found = find_torch_name(name)
    if found is None:
        raise CheckpointError(f"dtype {name} cannot be stored in safetensors; use one of {', '.join(_FROM_TORCH)}.")
    return found


def find_torch_name(name: str) -> str | None:
    """As `from_torch_name`, but None if safetensors has no such type."""
    return _FROM_TORCH.get(name.removeprefix("torch."))


def to_torch(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors name; imports torch."""
    import torch

    found: torch.dtype = getattr(torch, torch_name(dtype))
    return found


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, safetensors dtype and full logical shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][0]


def row_elements(shape: Sequence[int]) -> int:
    """Number of elements in a row, that is for one index along dim 0; 1 for a scalar."""
    return math.prod(shape[1:])
