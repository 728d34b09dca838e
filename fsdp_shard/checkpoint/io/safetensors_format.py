"""The safetensors format: names of element types, and headers. https://github.com/huggingface/safetensors#format

Headers are checked strictly. The safetensors package parses a header again on every open, names neither file nor tensor
in its errors, and does not expose byte offsets. Only `to_torch` imports torch.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular, other_content, parse_json, read_range, refuse_excess

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
PAGED_BYTES = 1 << 20
_NUM_FIRST = 32  # bytes of a file that identify its content
_MAX_HEADER = 100_000_000  # safetensors' own limit
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 64  # torch's own limit; products of thousands of large numbers take forever

# safetensors name -> (bytes per element, torch's attribute). Sub-byte types (F4, F6) have no flat byte ranges.
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


def main_dtype(sizes: Iterable[tuple[str, int]]) -> str | None:
    """Return the type in CASTABLE with the most bytes; None if there is none.

    Args:
        sizes: Type and bytes of each tensor.
    """
    num_bytes: Counter[str] = Counter()
    for dtype, size in sizes:
        if dtype in CASTABLE:
            num_bytes[dtype] += size
    return num_bytes.most_common(1)[0][0] if num_bytes else None


def kind_of(dtype: str) -> str:
    """The kind of numbers of a type: `floating-point`, `complex`, or `integer`, which includes booleans."""
    return "complex" if dtype == "C64" else "floating-point" if dtype.startswith(("F", "BF")) else "integer"


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
    """Like `from_torch_name`, but return None if safetensors has no such type."""
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
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes as stored."""
        return math.prod(self.shape) * _DTYPES[self.dtype][0]


class HeaderTensor(NamedTuple):
    """One tensor of a file: dtype, shape, absolute byte offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: `tensors` in file order, `metadata`, and `num_bytes`, the size of length field and JSON."""

    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]
    num_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of a file.

    Raises:
        CheckpointError: The header is wrong in any way; the message names the file, and the tensor if there is one.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(file.read(_NUM_FIRST), size, path)
        data = read_range(file.fileno(), 8, length, f"the header of {path}", "metadata_bytes")
    refuse_excess(data.count(b'"data_offsets"'), "tensors", f"the header of {path} has too many tensors")
    document = parse_json(data, f"the header of {path}")
    if not isinstance(document, dict):
        raise CheckpointError(f"the header of {path} is not a JSON object, so this is not a safetensors file.")
    metadata = _metadata(document.pop("__metadata__", {}), path)
    entries = {name: _entry(name, value, path) for name, value in document.items()}
    _check_layout(entries, size - 8 - length, path)
    ordered = sorted(entries.items(), key=lambda item: item[1][2])
    tensors = {name: HeaderTensor(dtype, shape, 8 + length + begin) for name, (dtype, shape, begin, _) in ordered}
    return Header(tensors, metadata, 8 + length)


def _header_length(data: bytes, size: int, path: Path) -> int:
    if (found := other_content(data)) is not None:
        raise CheckpointError(f"{path} is not a safetensors file but {found}.")
    if len(data) < 8:
        raise CheckpointError(
            f"{path} has {size} bytes, too few for a safetensors file: it is empty or truncated. Copy it again."
        )
    length: int = struct.unpack("<Q", data[:8])[0]
    if length > size - 8:
        raise CheckpointError(
            f"{path} says that its header takes {length} bytes, but the file has only {size}: "
            "it is truncated or not a safetensors file. Copy it again."
        )
    if length > _MAX_HEADER:
        raise CheckpointError(f"{path} has a header of {length} bytes; safetensors allows {_MAX_HEADER}.")
    return length


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"the header of {path} has a __metadata__ that is not a map of strings to strings.")
    return value


def _are_counts(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110 -- twice as fast as `all`, and a header may have tens of thousands of lists
        if type(value) is not int or not 0 <= value < 1 << 63:
            return False
    return True


def _entry(name: str, value: Any, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one header entry."""
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        raise _wrong(path, name, "must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not is_known(dtype):
        raise _wrong(path, name, f"has the dtype {dtype!r}, which is unknown")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not _are_counts(shape):
        raise _wrong(path, name, f"has the shape {str(shape)[:200]}; it must be a list of counts, at most {_MAX_DIMS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise _wrong(path, name, f"has the data_offsets {str(offsets)[:200]}; they must be two byte positions")
    begin, end = offsets
    expected = math.prod(shape) * itemsize(dtype)
    if end - begin != expected:
        raise _wrong(path, name, f"takes {end - begin} bytes, but {dtype} of shape {shape} takes {expected}")
    return dtype, tuple(shape), begin, end


def _wrong(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"the header of {path}: tensor {name!r} {problem}.")


def _check_layout(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]], data_bytes: int, path: Path) -> None:
    position, before = 0, ""
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin < position:
            raise CheckpointError(f"the header of {path}: the bytes of {before!r} and {name!r} overlap.")
        if begin > position:
            raise CheckpointError(f"the header of {path}: no tensor owns the {begin - position} bytes before {name!r}.")
        position, before = end, name
    if position != data_bytes:
        problem = "it is truncated" if position > data_bytes else "something was appended to it"
        raise CheckpointError(
            f"{path} has {data_bytes} bytes of tensor data, but its header describes {position}: {problem}. Copy it "
            "again."
        )


def build_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str], page_offset: int = 0
) -> tuple[bytes, dict[str, int]]:
    """Build the header of a file.

    Args:
        specs: Its tensors, in file order.
        metadata: The `__metadata__` of the file.
        page_offset: In a file of PAGED_BYTES or more, the first tensor begins this many bytes after a multiple of
            PAGE_BYTES. With the same page alignment as in the source file, a copy takes two thirds of the time.

    Returns:
        The first bytes of the file, and the absolute offset of each tensor, a multiple of 8.
    """
    position, document, relative = 0, {"__metadata__": dict(metadata)} if metadata else {}, {}
    for spec in specs:
        end = position + spec.num_bytes
        entry: Any = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        document[spec.name], relative[spec.name] = entry, position
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * ((page_offset // 8 * 8 - 8 - len(text)) % (PAGE_BYTES if position >= PAGED_BYTES else 8))
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + offset for name, offset in relative.items()}
