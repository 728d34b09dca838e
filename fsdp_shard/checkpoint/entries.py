"""The words of the tensor index: a tensor, the pieces of files that hold it, ranges of bytes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fsdp_shard.checkpoint import dtypes
from fsdp_shard.checkpoint.dtypes import TensorSpec

Read = Callable[[int, memoryview], None]


class Codec(Protocol):
    """How a piece whose stored bytes are not its logical ones (a quantised tensor) is decoded."""

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the piece."""

    def decode_into(self, read: Read, start: int, out: memoryview) -> None:
        """Write the logical bytes of the piece from flat element `start` on into `out`.

        `read(offset, buffer)` fills `buffer` with stored bytes from `offset` (relative to the piece) on.
        """


class Piece(NamedTuple):
    """A box of a logical tensor that lies row-major and contiguous in `file`, from byte `start` on."""

    file: str
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    codec: Codec | None = None


class TensorEntry(NamedTuple):
    """One logical tensor: safetensors dtype name, full shape, and the pieces that partition it, in flat order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * dtypes.itemsize(self.dtype)


class Span(NamedTuple):
    """The bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Extra:
    """Tensors that lie in a checkpoint beside the weights: how many, and their logical bytes."""

    num_tensors: int
    num_bytes: int


def count(entries: Iterable[TensorEntry]) -> Extra:
    """How many tensors, and their bytes."""
    sizes = [entry.num_bytes for entry in entries]
    return Extra(len(sizes), sum(sizes))
