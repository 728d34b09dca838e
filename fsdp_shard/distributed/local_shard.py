"""A rank's shard of a tensor, in a form common to all wrappers and checkpoint formats.

Under FSDP2, a rank holds some rows of each parameter; under FSDP1, a range of a flattened unit. Both are one contiguous
range of the row-major elements of each logical tensor. Tensor parallelism also divides columns, so that a shard is a
box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's elements [start, start + len(data)) of a row-major tensor.

    Attributes:
        tensor: The parameter or buffer that the model and the optimizer use.
        data: Flat view [num_elements] of this rank's own memory; writing into it changes the model.
        start: Offset of the first element in the row-major tensor.
        shape: Shape of the whole tensor.
        writes: Whether this rank writes the elements into a checkpoint; exactly one of the ranks that hold them does.
        box: (offsets, shape) of the shard if `data` holds the elements of a box, row by row, instead of a flat range.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def view_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return the flat local elements [num_elements] of an optimizer state with the parameter's shape."""
        from torch.distributed.tensor import DTensor

        local = state.to_local() if isinstance(state, DTensor) else state
        assert local.numel() == self.data.numel(), (local.shape, self.data.shape)
        return local.view(-1)

    def fill(self, whole: torch.Tensor) -> None:
        """Copy this rank's range from the whole tensor, or from its flat elements."""
        assert self.box is None, "the shard is a box, not a range of elements"
        self.data.copy_(whole.reshape(-1)[self.start : self.start + len(self.data)])


def shard_of(
    tensor: torch.Tensor, *, writes: bool, box: Callable[[Shape, Any, Any], tuple[Shape, Shape]] | None = None
) -> LocalShard:
    """Return this rank's shard of a tensor: all of it, some rows, or a box if columns are divided.

    Args:
        tensor: A DTensor, or a tensor that each rank holds in full.
        writes: See `LocalShard`.
        box: A cached `utils.local_shape_and_offset`, for many tensors.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from fsdp_shard.utils import local_shape_and_offset

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor, tensor.detach().view(-1), 0, shape, writes)
    local, offset = (box or local_shape_and_offset)(shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():  # ten times as fast
        data = tensor.to_local().detach().view(-1)
    if tuple(local[1:]) == shape[1:]:
        start = offset[0] * math.prod(shape[1:]) if shape else 0
        return LocalShard(tensor, data, start, shape, writes)
    start = sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(offset)) if data.numel() else 0
    return LocalShard(tensor, data, start, shape, writes, box=(tuple(offset), tuple(local)))


def is_first_copy(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether this rank is the first of those that hold the same part of a DTensor, on any mesh."""
    coordinate = mesh.get_coordinate()
    replicated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    is_first = coordinate is not None and all(coordinate[dim] == 0 for dim in replicated)
    return is_first and bool((mesh.mesh == 0).any())  # meshes without rank 0 are those of replicas
