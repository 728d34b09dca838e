"""The tensor index: each logical tensor of a checkpoint with its dtype, shape and the pieces of files that hold it.

`open_checkpoint` builds one from whatever lies at a path; everything that reads weights reads them through it. Knows
bytes and tensors, never a model class or a process group. torch is imported only by `TensorIndex.read`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import dtypes
from fsdp_shard.checkpoint.io.dtypes import TensorSpec
from fsdp_shard.checkpoint.io.files import Files, page_aligned
from fsdp_shard.checkpoint.steps.manifest import Manifest, read_manifest
from fsdp_shard.errors import CheckpointError

if TYPE_CHECKING:
    import torch


_SHORT_RUN_BYTES = 64 << 10  # runs shorter than this cost more to read one by one than to copy into place
_COMPARE_BYTES = 1 << 20
_HULL_BYTES = 4 << 20  # a box with short runs is read in row groups of about this many bytes, then narrowed


@dataclass
class TensorIndex:
    """The weights of one checkpoint. A context manager: it keeps the files it read from open until `close`.

    `aliases` maps a tied name to the name under which it is kept; readers take either. `step` and `world_size` are
    None where the checkpoint does not say. `extras` counts what is no weight, by kind: `optimizer`, `adapter`, `other`.
    `side` is the directory with config and tokenizer, where it is not `root`, and `own_tokenizer` that of an adapter's
    tokenizer, if it has one; `file` is the one file that was named.
    """

    root: Path
    format: str
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    extras: dict[str, Extra] = field(default_factory=dict)
    side: Path | None = None
    own_tokenizer: Path | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        for alias, kept in self.aliases.items():
            if alias in self.tensors or kept not in self.tensors:
                problem = f"{alias} is stored itself" if alias in self.tensors else f"{kept} is not stored"
                raise CheckpointError(f"{self.place} says that tensor {alias} is tied to {kept}, but {problem}.")
        self._files = Files(self.root)
        self._starts: dict[str, list[int] | None] = {}

    @property
    def place(self) -> Path:
        """What messages call it: the file that was named, else the directory."""
        return self.file or self.root

    def manifest(self) -> Manifest | None:
        """The manifest of it, if it has one of ours: none where one file was named, as it is of a whole directory."""
        return read_manifest(self.root) if self.file is None else None

    @property
    def names(self) -> list[str]:
        """Stored tensors, in file order; aliases are not among them."""
        return list(self.tensors)

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: entry.dtype for name, entry in self.tensors.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Logical bytes of all stored tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def entry(self, name: str) -> TensorEntry:
        """The entry of `name`, or of the tensor it is tied to; CheckpointError if there is neither."""
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            from fsdp_shard.utils import nearest

            raise CheckpointError(f"{self.root} has no tensor {name}{nearest(name, self.names)}.")
        return found

    def read_into(self, name: str, start: int, out: Any) -> None:
        """Fill the writable buffer `out` with the raw bytes of the flat elements of `name` from element `start` on.

        `len(out)` in bytes must be a whole number of elements. Imports no torch; may be called from several threads.
        """
        entry, view = self.entry(name), memoryview(out)
        if not view.nbytes:
            return
        view = view.cast("B")
        size = dtypes.itemsize(entry.dtype)
        count, rest = divmod(len(view), size)
        if rest or start < 0 or start + count > entry.num_elements:
            raise ValueError(f"{name} has {entry.num_elements} elements of {size} bytes: no {len(view)} at {start}")
        for piece in self._touched(entry, start, start + count):
            self._read_piece(entry, piece, start, view)

    def is_in_long_runs(self, name: str) -> bool:
        """Whether the bytes of `name` lie in its files as they are, and not in many short runs."""
        entry = self.entry(name)
        return all(piece.codec is None and _has_long_runs(entry, piece) for piece in entry.pieces)

    def clone(self, span: Span, target: int, at: int) -> bool:
        """Have byte `at` of the open file `target` and what follows share the blocks of `span`; False where it cannot.

        Both must begin at a page, and `span` be of whole pages.
        """
        return self._files.clone(span.file, span.start, span.num_bytes, target, at)

    def _touched(self, entry: TensorEntry, start: int, stop: int) -> Sequence[Piece]:
        """The pieces that may hold elements of [start, stop); found by bisection where all are flat ranges."""
        if len(entry.pieces) == 1:
            return entry.pieces
        if entry.name not in self._starts:
            flat = all(tensor_slices.is_contiguous(entry.shape, piece.shape) for piece in entry.pieces)
            starts = [tensor_slices.flat_start(entry.shape, piece.offsets) for piece in entry.pieces]
            self._starts[entry.name] = starts if flat else None
        known = self._starts[entry.name]
        if known is None:
            return entry.pieces
        return entry.pieces[max(bisect.bisect_right(known, start) - 1, 0) : bisect.bisect_left(known, stop)]

    def _read_piece(self, entry: TensorEntry, piece: Piece, start: int, view: memoryview) -> None:
        size = dtypes.itemsize(entry.dtype)
        stop = start + len(view) // size
        if _has_long_runs(entry, piece):
            for at, inside, count in tensor_slices.runs(entry.shape, piece.offsets, piece.shape, start, stop):
                self._fill(piece, size, inside, view[(at - start) * size : (at - start + count) * size])
        else:
            self._scatter_piece(entry, piece, start, view)

    def _scatter_piece(self, entry: TensorEntry, piece: Piece, start: int, view: memoryview) -> None:
        """Short runs follow on each other in the file: read them at once, then put each in its place."""
        import numpy as np

        size = dtypes.itemsize(entry.dtype)
        parts = list(
            tensor_slices.strided_runs(entry.shape, piece.offsets, piece.shape, start, start + len(view) // size)
        )
        if not parts:
            return
        first, last = parts[0].inside, parts[-1].inside + parts[-1].repeats * parts[-1].size
        stored = np.frombuffer(page_aligned((last - first) * size), np.uint8)
        self._fill(piece, size, first, stored.data)
        target = np.frombuffer(view, np.uint8)
        for part in parts:
            low, width = (part.inside - first) * size, part.size * size
            rows = np.lib.stride_tricks.as_strided(
                target[(part.at - start) * size :], (part.repeats, width), (part.step * size, 1)
            )
            rows[:] = stored[low : low + part.repeats * width].reshape(part.repeats, width)

    def _fill(self, piece: Piece, size: int, inside: int, out: memoryview) -> None:
        """Read the elements of a piece from its flat element `inside` on."""
        if piece.codec is None:
            self._files.read_into(piece.file, piece.start + inside * size, out)
        else:
            piece.codec.decode_into(
                lambda offset, buffer: self._files.read_into(piece.file, piece.start + offset, buffer), inside, out
            )

    def read(self, name: str, slices: Sequence[slice | int] | slice | int | None = None) -> torch.Tensor:
        """The tensor `name`, or a part of it, in fresh CPU memory and in its own dtype.

        `slices` are as for indexing a tensor: integers and slices with positive steps, one a leading dimension; what
        is not named is taken whole. Only the bytes of the part are read (whole rows where the runs are short).
        """
        import torch

        entry = self.entry(name)
        if slices is None:
            slices = ()
        elif isinstance(slices, (slice, int)):
            slices = (slices,)
        offsets, shape, rest = _box_of(entry, slices)
        out = torch.empty(shape, dtype=dtypes.to_torch(entry.dtype))
        if math.prod(shape):
            self._read_box(entry, offsets, shape, out)
        part = out[rest]
        is_strided = any(isinstance(item, slice) and (item.step or 1) > 1 for item in rest)
        return part.clone(memory_format=torch.contiguous_format) if is_strided else part

    def _read_box(
        self, entry: TensorEntry, offsets: tuple[int, ...], shape: tuple[int, ...], out: torch.Tensor
    ) -> None:
        if tensor_slices.is_contiguous(entry.shape, shape):
            self.read_into(entry.name, tensor_slices.flat_start(entry.shape, offsets), tensor_bytes(out))
            return
        # Short runs: read groups of whole rows of the axis above them, and keep the part that is wanted.
        axis = tensor_slices.inner_axis(entry.shape, shape)
        row_bytes = math.prod(entry.shape[axis:]) * dtypes.itemsize(entry.dtype)
        rows = max(1, _HULL_BYTES // row_bytes)
        for outer in _indices(shape[: axis - 1]):
            here = tuple(a + b for a, b in zip(offsets, outer, strict=False))
            for first in range(0, shape[axis - 1], rows):
                count = min(rows, shape[axis - 1] - first)
                hull = out.new_empty((count, *entry.shape[axis:]))
                at = (*here, offsets[axis - 1] + first, *[0] * (len(shape) - axis))
                self.read_into(entry.name, tensor_slices.flat_start(entry.shape, at), tensor_bytes(hull))
                out[outer].narrow(0, first, count).copy_(hull.narrow(1, offsets[axis], shape[axis]))

    def places(self, name: str, start: int, stop: int) -> list[Span]:
        """Where the flat elements [start, stop) of `name` lie, in order; neighbors in a file are one span.

        Of a piece with a codec the whole piece is named.
        """
        entry = self.entry(name)
        size = dtypes.itemsize(entry.dtype)
        runs: list[tuple[int, Span]] = []
        for piece in self._touched(entry, start, stop):
            for at, inside, count in tensor_slices.runs(entry.shape, piece.offsets, piece.shape, start, stop):
                low, high = piece.start + inside * size, piece.start + (inside + count) * size
                if piece.codec is not None:
                    low, high = piece.start, piece.start + piece.codec.num_bytes
                runs.append((at, Span(piece.file, low, high)))
        found: list[Span] = []
        for _, span in sorted(runs, key=lambda run: run[0]):
            if found and found[-1].file == span.file and found[-1].stop == span.start:
                span = Span(span.file, found.pop().start, span.stop)
            found.append(span)
        return found

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes; reads them only where the first two agree."""
        one, two = self.entry(first), self.entry(second)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        size = dtypes.itemsize(one.dtype)
        step = _COMPARE_BYTES // size
        for start in range(0, one.num_elements, step):
            buffers = [bytearray(min(step, one.num_elements - start) * size) for _ in range(2)]
            self.read_into(first, start, buffers[0])
            self.read_into(second, start, buffers[1])
            if buffers[0] != buffers[1]:
                return False
        return True

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._files.close()

    def __enter__(self) -> TensorIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _has_long_runs(entry: TensorEntry, piece: Piece) -> bool:
    if tensor_slices.is_contiguous(entry.shape, piece.shape):
        return True
    return tensor_slices.run_elements(entry.shape, piece.shape) * dtypes.itemsize(entry.dtype) >= _SHORT_RUN_BYTES


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype as a writable view of bytes, for `read_into`."""
    import torch

    assert tensor.is_contiguous(), "only contiguous memory is one view of bytes"
    assert tensor.device.type == "cpu", "a view of bytes is of CPU memory"
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def _box_of(
    entry: TensorEntry, slices: Sequence[slice | int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[slice | int, ...]]:
    """(offsets, shape) of the smallest box that holds the part, and how to index that box to get the part."""
    if len(slices) > len(entry.shape):
        raise IndexError(f"{len(slices)} slices of {entry.name}, which has {len(entry.shape)} dimensions")
    offsets, shape, rest = [0] * len(entry.shape), list(entry.shape), []
    for axis, (part, size) in enumerate(zip(slices, entry.shape, strict=False)):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 1:
                raise IndexError(f"{entry.name}: slices go forward, and {part} does not")
            offsets[axis], shape[axis] = start, max(stop - start, 0)
            rest.append(slice(None, None, step))
            continue
        if not -size <= part < size:
            raise IndexError(f"{entry.name}: index {part} is outside dimension {axis} of size {size}")
        offsets[axis], shape[axis] = part % size, 1
        rest.append(0)  # type: ignore[arg-type]  # an int indexes the box as a slice does
    return tuple(offsets), tuple(shape), tuple(rest)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def checked(root: Path, name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> TensorEntry:
    """An entry of the pieces in flat order, after checking that they hold each element of the tensor exactly once."""
    problem = tensor_slices.coverage_problem(shape, [(piece.offsets, piece.shape) for piece in pieces])
    if problem is not None:
        held = ", ".join(sorted({piece.file for piece in pieces})) or "no file"
        raise CheckpointError(f"{root}: tensor {name} of shape {list(shape)} is not whole: {problem} (in {held}).")
    ordered = sorted(pieces, key=lambda piece: tensor_slices.flat_start(shape, piece.offsets))
    return TensorEntry(name, dtype, shape, tuple(ordered))


def aliases_in(metadata: Mapping[str, str], tensors: Mapping[str, object]) -> dict[str, str]:
    """Tied names as `safetensors.torch.save_model` notes them in `__metadata__`: {alias: kept name}."""
    return {alias: kept for alias, kept in metadata.items() if kept in tensors and alias not in tensors}


Read = Callable[[int, memoryview], None]


class Codec(Protocol):
    """How a piece whose stored bytes are not its logical ones (a quantized tensor) is decoded."""

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
