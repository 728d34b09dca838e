"""Reads tensors that are not row-major in their file: transposed, expanded, or slices of a larger tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import Checksum, itemsize, page_aligned
from fsdp_shard.checkpoint.tensor_entry import Piece, Read
from fsdp_shard.checkpoint.torch_pickle.tensor import StoredTensor

_SLAB_BYTES = 4 << 20  # read at a time, from the first to the last element of a part


def piece_of(file: str, tensor: StoredTensor, offsets: Sequence[int]) -> Piece:
    """Return a stored tensor as the piece at `offsets` of a logical tensor, with a codec if it is not row-major."""
    is_plain = _is_row_major(tensor.shape, tensor.stride)
    codec = None if is_plain else StridedCodec(tensor.shape, tensor.stride, itemsize(tensor.dtype))
    return Piece(file, tensor.start, tuple(offsets), tensor.shape, codec, checksum_of(tensor))


def checksum_of(tensor: StoredTensor) -> Checksum | None:
    """The checksum of a stored tensor's storage; None if the file has none."""
    member = tensor.member
    return Checksum(member.start, member.num_bytes, member.crc) if member is not None and member.crc else None


def box_of(tensor: StoredTensor, offsets: Sequence[int], shape: Sequence[int]) -> StoredTensor:
    """Return a box of a stored tensor as a stored tensor."""
    first = sum(offset * step for offset, step in zip(offsets, tensor.stride, strict=True))
    start = tensor.start + first * itemsize(tensor.dtype)
    return StoredTensor(tensor.dtype, tuple(shape), tensor.stride, start, tensor.member)


def _is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return not math.prod(shape)
        expected *= size
    return True


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements in the file between the first and the last element, inclusive."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


@dataclass(frozen=True, slots=True)
class StridedCodec:
    """Reads elements with `stride` (one number per dimension, 0 if expanded) in row-major order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return _extent(self.shape, self.stride) * self.itemsize

    def decode_into(self, read: Read, start: int, out: memoryview) -> None:
        import numpy as np

        kind = f"u{self.itemsize}"
        for offsets, box in tensor_slices.flat_boxes(self.shape, start, len(out) // self.itemsize):
            count = math.prod(box) * self.itemsize
            target = np.frombuffer(out[:count], kind).reshape(box)
            first = sum(offset * step for offset, step in zip(offsets, self.stride, strict=True))
            self._fill(read, first, target)
            out = out[count:]

    def _fill(self, read: Read, first: int, target: Any) -> None:
        """Read the box of `target`, which begins at element `first` of the piece, in halves if it is too wide."""
        import numpy as np

        extent = _extent(target.shape, self.stride)
        if extent * self.itemsize > _SLAB_BYTES and target.size > 1:
            lengths = [(size - 1) * step for size, step in zip(target.shape, self.stride, strict=True)]
            axis = lengths.index(max(lengths))
            half = target.shape[axis] // 2
            low, high = np.split(target, [half], axis)
            self._fill(read, first, low)
            self._fill(read, first + half * self.stride[axis], high)
            return
        stored: Any = np.frombuffer(page_aligned(extent * target.itemsize), target.dtype)
        read(first * self.itemsize, memoryview(stored).cast("B"))
        steps = [step * self.itemsize for step in self.stride]
        target[...] = np.lib.stride_tricks.as_strided(stored, target.shape, steps)
