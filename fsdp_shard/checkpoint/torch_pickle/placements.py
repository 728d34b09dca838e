"""Computes a rank's box of a tensor under DTensor placements on a mesh. Pure arithmetic on tuples, no torch.

Source: `compute_local_shape_and_global_offset` of torch.distributed.tensor._utils (2.13), against which it is tested.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_shard.checkpoint.tensor_slices import Box


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor is distributed along one dimension of the mesh.

    `dim` and `split_factor` are those of a shard. A factor above 1 is torch's `_StridedShard`: the tensor was cut into
    that many parts by a later mesh dimension first (FSDP over tensor parallelism), and each part is cut again.
    """

    kind: Literal["shard", "replicate", "partial"]
    dim: int = 0
    split_factor: int = 1

    def __str__(self) -> str:
        if self.kind != "shard":
            return self.kind
        return f"shard({self.dim})" if self.split_factor == 1 else f"shard({self.dim}, in {self.split_factor} parts)"


Span = tuple[int, int]
_MAX_SPANS = 1 << 12  # of a rank in a tensor; their number is that of the tensor-parallel ranks


def local_spans(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[list[Span]]:
    """Return, for each dimension of a tensor, the index ranges [start, stop) held by the rank at `coordinate`.

    The local tensor is their product, one range after the other; only strided shards have several ranges in a
    dimension. Raises ValueError for a nonexistent mesh or dimension, and for partial placements, which hold summands.
    """
    spans = [[(0, size)] for size in shape]
    for num_chunks, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.kind == "partial":
            raise ValueError("it holds partial sums that were never reduced")
        if placement.kind == "replicate":
            continue
        if placement.dim >= len(shape) or not 0 <= index < num_chunks or placement.split_factor < 1:
            raise ValueError(f"it is sharded on dimension {placement.dim} of {len(shape)}")
        if min(placement.split_factor, shape[placement.dim]) * len(spans[placement.dim]) <= _MAX_SPANS:
            spans[placement.dim] = _cut(spans[placement.dim], placement.split_factor, num_chunks, index)
        elif math.prod(shape):
            raise ValueError(f"it is cut into more than {_MAX_SPANS} parts")
    if math.prod(map(len, spans)) > _MAX_SPANS:
        raise ValueError(f"it is cut into more than {_MAX_SPANS} parts")
    return spans


def local_boxes(spans: Sequence[Sequence[Span]]) -> list[tuple[tuple[int, ...], Box]]:
    """The boxes that make up a rank's part: (offsets in the local tensor, box in the full tensor)."""
    placed = [_placed(ranges) for ranges in spans]
    return [
        (tuple(local for local, _, _ in part), (tuple(start for _, start, _ in part), tuple(n for *_, n in part)))
        for part in itertools.product(*placed)
    ]


def _placed(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """(index in the local tensor, index in the full tensor, length) of each range; an empty one if there are none."""
    placed, local = [], 0
    for start, stop in spans:
        placed.append((local, start, stop - start))
        local += stop - start
    return placed or [(0, 0, 0)]


def _cut(spans: Sequence[Span], num_parts: int, num_chunks: int, index: int) -> list[Span]:
    """Cut the spans into parts and each part into chunks, like torch.chunk; return chunk `index` of each part."""
    total = sum(stop - start for start, stop in spans)
    size = -(-total // num_parts)
    kept: list[Span] = []
    for begin in range(0, total, size) if size else ():
        end = min(begin + size, total)
        chunk = -(-(end - begin) // num_chunks)
        kept += _slice(spans, min(begin + index * chunk, end), min(begin + (index + 1) * chunk, end))
    return _joined(kept)


def _slice(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The part of the spans from position `begin` to `end`, counted as if they were concatenated."""
    found, position = [], 0
    for start, stop in spans:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            found.append((start + low, start + high))
        position += stop - start
    return found


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
