"""The description of one tensor of a checkpoint: dtype, shape, and the pieces of files that hold it. Plain data."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import Checksum, TensorSpec, itemsize
from fsdp_shard.errors import CheckpointError

_SHORT_RUN_BYTES = 64 << 10  # shorter runs are cheaper to read together and copy into place than to read one by one

Read = Callable[[int, memoryview], None]


class Codec(Protocol):
    """Decodes a piece whose stored bytes differ from its logical ones, such as a quantized tensor."""

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the piece."""

    def decode_into(self, read: Read, start: int, out: memoryview) -> None:
        """Write logical bytes of the piece.

        Args:
            read: `read(offset, buffer)` fills `buffer` with stored bytes; `offset` is relative to the piece.
            start: The first flat element to write.
            out: The buffer to fill.
        """


class Piece(NamedTuple):
    """A box of a tensor, at `offsets` with `shape`, row-major and contiguous in `file` from byte `start`.

    `checksum` covers the surrounding part of the file that has a CRC, if any.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    codec: Codec | None = None
    checksum: Checksum | None = None


class TensorEntry(NamedTuple):
    """One tensor: safetensors dtype name, full shape, and the pieces that partition it, in flat order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Logical bytes of the whole tensor."""
        return self.num_elements * itemsize(self.dtype)

    @property
    def is_in_long_runs(self) -> bool:
        """Whether its bytes are stored unencoded, and not in many short runs."""
        return all(piece.codec is None and self.has_long_runs(piece) for piece in self.pieces)

    @property
    def has_checksum(self) -> bool:
        """Whether its files have CRCs, which are compared once all of it is read."""
        return any(piece.checksum is not None for piece in self.pieces)

    def is_stored_as(self, other: "TensorEntry") -> bool:
        """Whether dtype, shape and pieces are the same."""
        return (self.dtype, self.shape, tuple(self.pieces)) == (other.dtype, other.shape, tuple(other.pieces))

    def with_codec(self, codec: Codec) -> "TensorEntry":
        """The entry as one piece that `codec` decodes; its file stands for all files of the entry."""
        first = self.pieces[0]
        return self._replace(pieces=(Piece(first.file, first.start, (0,) * len(self.shape), self.shape, codec),))

    def has_long_runs(self, piece: Piece) -> bool:
        """Whether `piece` consists of few long runs of the flat tensor, each worth a separate read."""
        run_bytes = tensor_slices.run_elements(self.shape, piece.shape) * itemsize(self.dtype)
        return run_bytes >= _SHORT_RUN_BYTES or tensor_slices.is_contiguous(self.shape, piece.shape)


class Span(NamedTuple):
    """The bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Length of the span."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Extra:
    """Tensors of a checkpoint that are not weights: how many, and their logical bytes."""

    num_tensors: int
    num_bytes: int


def count(entries: Iterable[TensorEntry]) -> Extra:
    """Count tensors and their bytes."""
    sizes = [entry.num_bytes for entry in entries]
    return Extra(len(sizes), sum(sizes))


def checked_entry(root: Path, name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> TensorEntry:
    """Create an entry from pieces in any order.

    Raises:
        CheckpointError: The pieces do not hold each element of the tensor exactly once.
    """
    problem = tensor_slices.coverage_problem(shape, [(piece.offsets, piece.shape) for piece in pieces])
    if problem is not None:
        held = ", ".join(sorted({piece.file for piece in pieces})) or "no file"
        raise CheckpointError(f"{root}: tensor {name} of shape {list(shape)} is not whole: {problem} (in {held}).")
    ordered = sorted(pieces, key=lambda piece: tensor_slices.flat_start(shape, piece.offsets))
    return TensorEntry(name, dtype, shape, tuple(ordered))
