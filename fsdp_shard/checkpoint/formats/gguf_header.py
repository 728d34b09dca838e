"""Reads the header of a GGUF file: key-value metadata, and the byte range of each tensor.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader trusts every
length in the file, and builds two arrays for each token of a tokenizer.
"""

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import exceeded, format_size, limits, open_regular, refuse_excess

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MAX_DIMS, _MIN_BYTES = 8, 12  # of a tensor, and of a header entry
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


BlockOf = Callable[[int], tuple[int, int] | None]
"""(elements, bytes) of a block of a ggml type; None if the type is unknown."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored: ggml type number, shape in row-major order, absolute byte offset and size."""

    kind: int
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """`values` holds the metadata except arrays (of a tokenizer), which are skipped."""

    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a regular file that begins like a GGUF file."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


def read_gguf_header(path: Path, block_of: BlockOf) -> GGUFHeader:
    """Read and check the header of a GGUF file; raise CheckpointError, which names the file, for any error."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise CheckpointError(f"{path} is too short for a GGUF file: it was cut short.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, block_of).parse()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap, block_of: BlockOf) -> None:
        self._path, self._data, self._block_of = path, data, block_of
        self._size, self._position = len(data), 4
        self._end = min(self._size, limits().metadata_bytes)

    def parse(self) -> GGUFHeader:
        """Read the header from its start."""
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._error(f"has version {version}; versions 2 and 3 in little-endian order can be read")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        if _MIN_BYTES * max(num_tensors, num_values) > self._size:
            raise self._error("has fewer bytes than tensors and values in its header: it was cut short")
        refuse_excess(max(num_tensors, num_values), "tensors", f"{self._path} has too many tensors or values")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            value = self._value(self._scalar("<I"))
            if key in values:
                raise self._error(f"has the key {key} twice")
            values[key] = value
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in found:
                raise self._error(f"has the tensor {name} twice")
            num_dims = self._scalar("<I")
            if num_dims > _MAX_DIMS:
                raise self._error(f"has a tensor {name} of {num_dims} dimensions")
            dims = [self._scalar("<Q") for _ in range(num_dims)]
            found[name] = (self._scalar("<I"), tuple(reversed(dims)), self._scalar("<Q"))
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise self._error(f"has the alignment {alignment!r}, which is not a multiple of 8")
        base = -(-self._position // alignment) * alignment
        tensors = {name: self._tensor(name, base, *item) for name, item in found.items()}
        self._check_overlap(tensors)
        return GGUFHeader(values, tensors)

    def _tensor(self, name: str, base: int, kind: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        block = self._block_of(kind)
        if block is None:
            raise self._error(f"stores tensor {name} in the ggml type {kind}, which cannot be decoded")
        elements, block_bytes = block
        if shape and shape[-1] % elements:
            raise self._error(
                f"has rows of {shape[-1]} elements in tensor {name}, which blocks of {elements} do not fill"
            )
        num_bytes = math.prod(shape) // elements * block_bytes
        start = base + offset
        if start + num_bytes > self._size:
            raise self._error(
                f"has {self._size} bytes, but tensor {name} ends at {start + num_bytes}: it was cut short"
            )
        return GGUFTensor(kind, shape, start, num_bytes)

    def _check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if tensor.start < end:
                raise self._error(f"has tensors {before} and {name} in overlapping bytes")
            end, before = tensor.start + tensor.num_bytes, name

    def _take(self, count: int) -> int:
        """Advance by `count` bytes; return the position of the first one."""
        start, self._position = self._position, self._position + count
        if self._position > self._end:
            if self._position > self._size:
                raise self._error("ends inside its header: it was cut short")
            raise self._error(f"has a header of {format_size(self._position)} or more: {exceeded('metadata_bytes')}")
        return start

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self._data, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        count = self._scalar("<Q")
        start = self._take(count)
        refuse_excess(count, "config_bytes", f"{self._path} has a text of {format_size(count)} in its header")
        try:
            return self._data[start : self._position].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("has a text in its header that is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _SCALARS:
            raise self._error(f"has a value of the unknown type {kind} in its header")
        return self._scalar(_SCALARS[kind])

    def _skip_array(self) -> None:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind in _SCALARS:
            self._take(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            if 8 * count > self._size - self._position:
                raise self._error(f"has an array of {count} texts in its header, more than it has bytes for")
            refuse_excess(count, "array_items", f"{self._path} has an array of {count:,} texts in its header")
            for _ in range(count):
                self._take(self._scalar("<Q"))
        else:
            raise self._error(f"has an array of the type {kind} in its header")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {problem}.")
