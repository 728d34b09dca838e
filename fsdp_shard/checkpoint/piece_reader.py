"""Reads tensors, or parts of them, from the file pieces that hold them. Only `read` imports torch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import ChecksumTracker, FileHeader, Files, itemsize, page_aligned, to_torch
from fsdp_shard.checkpoint.piece_table import PieceTable
from fsdp_shard.checkpoint.tensor_entry import Piece, Span, TensorEntry
from fsdp_shard.checkpoint.tensor_slices import FlatOrder

if TYPE_CHECKING:
    import torch

_CHECK_BYTES = 4 << 20  # of a storage, read at a time
ROW_GROUP_BYTES = 4 << 20  # a box with short runs is read in groups of full rows of about this size, then narrowed


class PieceReader:
    """Reads the tensors of one checkpoint. Its files stay open until `close`; a later read opens them again.

    If a file has the CRC of a storage, it is compared once all of the storage has been read, in any number of reads: a
    part of a tensor that is read alone is not checked. Tensors stored with other strides are checked before they are
    read.

    Args:
        root: The directory of the files.
        headers: The required headers of some of them.
    """

    def __init__(self, root: Path, headers: Mapping[str, FileHeader] | None = None) -> None:
        self.files, self.checksums = Files(root, headers), ChecksumTracker(root)
        self._orders: dict[str, FlatOrder] = {}

    def read_into(self, entry: TensorEntry, start: int, out: memoryview) -> None:
        """Fill `out`, a view of bytes, with the flat elements of `entry` from element `start`."""
        size = itemsize(entry.dtype)
        stop = start + len(out) // size
        for piece in self._overlapping(entry, start, stop):
            if not entry.has_long_runs(piece):
                self._scatter(entry, piece, start, out)
                continue
            for at, inside, count in tensor_slices.runs(entry.shape, piece.offsets, piece.shape, start, stop):
                self._fill(piece, size, inside, out[(at - start) * size : (at - start + count) * size])

    def read(self, entry: TensorEntry, slices: Sequence[slice | int]) -> torch.Tensor:
        """The part of a tensor that `slices` select, in new CPU memory; only its bytes are read."""
        import torch

        offsets, shape, rest = _box_of(entry, slices)
        out = torch.empty(shape, dtype=to_torch(entry.dtype), device="cpu")  # torch.set_default_device may differ
        if out.numel():
            self._read_box(entry, offsets, shape, out)
        part = out[rest]
        is_strided = any(isinstance(item, slice) and (item.step or 1) > 1 for item in rest)
        return part.clone(memory_format=torch.contiguous_format) if is_strided else part

    def spans(self, entry: TensorEntry, start: int, stop: int) -> list[Span]:
        """The file bytes that hold the flat elements [start, stop), in order; a piece with a codec is listed in full.

        Neighbors in a file are joined.
        """
        size = itemsize(entry.dtype)
        parts: list[tuple[int, Span]] = []
        for piece in self._overlapping(entry, start, stop):
            for at, inside, count in tensor_slices.runs(entry.shape, piece.offsets, piece.shape, start, stop):
                low, high = piece.start + inside * size, piece.start + (inside + count) * size
                if piece.codec is not None:
                    low, high = piece.start, piece.start + piece.codec.num_bytes
                parts.append((at, Span(piece.file, low, high)))
        found: list[Span] = []
        for _, span in sorted(parts, key=lambda part: part[0]):
            if found and found[-1].file == span.file and found[-1].stop == span.start:
                span = Span(span.file, found.pop().start, span.stop)
            found.append(span)
        return found

    def _overlapping(self, entry: TensorEntry, start: int, stop: int) -> Sequence[Piece]:
        """The pieces that may hold elements of [start, stop), found by bisection."""
        pieces = entry.pieces
        if len(pieces) == 1:
            return pieces
        if isinstance(pieces, PieceTable):
            return pieces[pieces.order.overlapping(start, stop)]
        if entry.name not in self._orders:
            boxes = [(piece.offsets, piece.shape) for piece in pieces]
            self._orders[entry.name] = tensor_slices.flat_order(entry.shape, boxes)
        return pieces[self._orders[entry.name].overlapping(start, stop)]

    def _scatter(self, entry: TensorEntry, piece: Piece, start: int, out: memoryview) -> None:
        """Read short runs, which are contiguous in the file, at once; then copy each to its offset in `out`."""
        import numpy as np

        size = itemsize(entry.dtype)
        stop = start + len(out) // size
        parts = list(tensor_slices.strided_runs(entry.shape, piece.offsets, piece.shape, start, stop))
        if not parts:
            return
        first, last = parts[0].inside, parts[-1].inside + parts[-1].repeats * parts[-1].size
        stored = np.frombuffer(page_aligned((last - first) * size), np.uint8)
        self._fill(piece, size, first, stored.data)
        target = np.frombuffer(out, np.uint8)
        for part in parts:
            low, width = (part.inside - first) * size, part.size * size
            rows = np.lib.stride_tricks.as_strided(
                target[(part.at - start) * size :], (part.repeats, width), (part.step * size, 1)
            )
            rows[:] = stored[low : low + part.repeats * width].reshape(part.repeats, width)

    def _fill(self, piece: Piece, size: int, inside: int, out: memoryview) -> None:
        """Read the elements of a piece from its flat element `inside`."""
        if piece.codec is None:
            self.files.read_into(piece.file, piece.start + inside * size, out)
            if piece.checksum is not None:
                self.checksums.add(piece.file, piece.checksum, piece.start + inside * size, out)
        else:
            self.finish_checksum(piece)
            piece.codec.decode_into(
                lambda offset, buffer: self.files.read_into(piece.file, piece.start + offset, buffer), inside, out
            )

    def finish_checksum(self, piece: Piece) -> None:
        """Read the unread rest of a piece's storage, and so compare its CRC, if it has one."""
        if piece.checksum is None:
            return
        for start, stop in self.checksums.gaps(piece.file, piece.checksum):
            buffer = page_aligned(min(_CHECK_BYTES, stop - start))
            for at in range(start, stop, _CHECK_BYTES):
                part = buffer[: min(_CHECK_BYTES, stop - at)]
                self.files.read_into(piece.file, at, part)
                self.checksums.add(piece.file, piece.checksum, at, part)

    def _read_box(
        self, entry: TensorEntry, offsets: tuple[int, ...], shape: tuple[int, ...], out: torch.Tensor
    ) -> None:
        if tensor_slices.is_contiguous(entry.shape, shape):
            self.read_into(entry, tensor_slices.flat_start(entry.shape, offsets), tensor_bytes(out))
            return
        # Read only the part of each piece in the box: the files of ranks with other columns are not opened.
        start = tensor_slices.flat_start(entry.shape, offsets)
        for piece in self._overlapping(entry, start, start + tensor_slices.flat_extent(entry.shape, shape)):
            common = tensor_slices.intersection((offsets, shape), (piece.offsets, piece.shape))
            if common is not None:
                inside = tuple(a - b for a, b in zip(common[0], piece.offsets, strict=True))
                part = out
                for axis, (at, low, size) in enumerate(zip(common[0], offsets, common[1], strict=True)):
                    part = part.narrow(axis, at - low, size)
                self._read_from(entry, piece, inside, part)

    def _read_from(self, entry: TensorEntry, piece: Piece, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill `out`, which may have any strides, with the box of its shape at `offsets` of one piece."""
        shape = tuple(out.shape)
        alone = TensorEntry(entry.name, entry.dtype, piece.shape, (piece._replace(offsets=(0,) * len(shape)),))
        if tensor_slices.is_contiguous(piece.shape, shape):
            whole = out if out.is_contiguous() else out.new_empty(shape)
            self.read_into(alone, tensor_slices.flat_start(piece.shape, offsets), tensor_bytes(whole))
            if whole is not out:
                out.copy_(whole)
            return
        # Short runs: read groups of full rows of the axis above them, and keep the requested part.
        axis = tensor_slices.inner_axis(piece.shape, shape)
        row_bytes = math.prod(piece.shape[axis:]) * itemsize(entry.dtype)
        num_rows = max(1, ROW_GROUP_BYTES // row_bytes)
        for outer in itertools.product(*map(range, shape[: axis - 1])):
            above = [a + b for a, b in zip(offsets, outer, strict=False)]
            for first in range(0, shape[axis - 1], num_rows):
                count = min(num_rows, shape[axis - 1] - first)
                rows = out.new_empty((count, *piece.shape[axis:]))
                at = (*above, offsets[axis - 1] + first, *[0] * (len(shape) - axis))
                self.read_into(alone, tensor_slices.flat_start(piece.shape, at), tensor_bytes(rows))
                out[outer].narrow(0, first, count).copy_(rows.narrow(1, offsets[axis], shape[axis]))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype as a writable view of bytes, for `read_into`."""
    import torch

    assert tensor.is_contiguous(), "only contiguous memory is one view of bytes"
    assert tensor.device.type == "cpu", "a view of bytes is of CPU memory"
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def _is_integer(part: Any) -> bool:
    """Whether `part` is an integer of Python, NumPy or torch; bools and tensors with dimensions have other meanings."""
    return hasattr(part, "__index__") and not isinstance(part, bool) and not getattr(part, "ndim", 0)


def _box_of(
    entry: TensorEntry, slices: Sequence[slice | int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[slice | int, ...]]:
    """(offsets, shape) of the smallest box that contains the part, and the index of the part in that box."""
    if len(slices) > len(entry.shape):
        raise IndexError(f"{len(slices)} slices of {entry.name}, which has {len(entry.shape)} dimensions")
    offsets, shape = [0] * len(entry.shape), list(entry.shape)
    rest: list[slice | int] = []
    for axis, (part, size) in enumerate(zip(slices, entry.shape, strict=False)):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 1:
                raise IndexError(f"{entry.name}: the step of a slice must be positive, and {part} has {step}")
            offsets[axis], shape[axis] = start, max(stop - start, 0)
            rest.append(slice(None, None, step))
            continue
        if not _is_integer(part):
            raise IndexError(f"{entry.name}: {part!r} is neither an integer nor a slice")
        part = operator.index(part)
        if not -size <= part < size:
            raise IndexError(f"{entry.name}: index {part} is outside dimension {axis} of size {size}")
        offsets[axis], shape[axis] = part % size, 1
        rest.append(0)
    return tuple(offsets), tuple(shape), tuple(rest)
