"""One rank's part of a sharded tensor in a torch.save file: DTensors with their mesh, and FSDP1's ShardedTensors.

Sources: torch/distributed/tensor, torch/distributed/device_mesh.py and torch/distributed/_shard of torch 2.13; comments
note differences in older versions of torch. Imports no torch.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fsdp_shard.checkpoint.io import from_torch_name
from fsdp_shard.checkpoint.tensor_slices import Box
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import Record, count, counts
from fsdp_shard.checkpoint.torch_pickle.placements import Placement
from fsdp_shard.checkpoint.torch_pickle.tensor import StoredTensor, Unreadable
from fsdp_shard.utils import exceeded, limits


@dataclass(frozen=True)
class StoredDTensor:
    """One rank's part of a DTensor. `shape` is the full tensor's; `mesh_ranks` are in row-major order of `mesh_shape`.

    `coordinate` is the mesh coordinate of the rank that wrote the file.
    """

    local: StoredTensor | Unreadable
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class StoredShards:
    """One rank's part of an FSDP1 ShardedTensor: the shards in this file, and the boxes of all ranks."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], StoredTensor], ...]
    boxes: tuple[Box, ...]


AnyTensor = StoredTensor | StoredDTensor | StoredShards | Unreadable


def rebuild_parameter(data: Any, *rest: Any) -> Any:
    """`torch._utils._rebuild_parameter` and similar functions: the tensor that the parameter wraps."""
    if not isinstance(data, AnyTensor):
        raise TypeError(f"a parameter that wraps a {type(data).__name__}")
    return data


def rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor of a subclass, or a tensor with attributes."""
    name = getattr(function, "name", "")
    if not isinstance(arguments, tuple):
        raise TypeError("a tensor's arguments are not a tuple")
    if name == "torch._utils._rebuild_wrapper_subclass":
        return _wrapper(getattr(kind, "name", ""), arguments, state)
    if not name.startswith("torch._utils._rebuild_"):
        raise TypeError(f"{name[:100] or 'something'} rebuilds no tensor")
    return function.make(*arguments)


def _wrapper(kind: str, arguments: tuple[Any, ...], state: Any) -> AnyTensor:
    """A subclass without storage. `arguments`: (type, dtype, size, stride, offset, layout, device, grad)."""
    shape = counts(arguments[2])
    if kind.endswith(".DTensor"):
        return _dtensor(shape, state)
    if kind.endswith(".ShardedTensor"):
        return _sharded_tensor(shape, state)
    return Unreadable(f"is a {kind.rpartition('.')[2] or 'subclass of a tensor'}, which has no bytes of its own")


def _dtensor(shape: tuple[int, ...], state: Any) -> StoredDTensor:
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    local, spec = state["_local_tensor"], state["_spec"]
    if not isinstance(local, (StoredTensor, Unreadable)) or not isinstance(spec, Record):
        raise TypeError("a DTensor without a local tensor or a spec")
    placements = spec.get("placements")
    if not isinstance(placements, tuple) or not all(isinstance(item, Record) for item in placements):
        raise TypeError("a DTensor without placements")
    return StoredDTensor(local, shape, *_mesh(spec.get("mesh")), tuple(map(_placement, placements)))


def _placement(item: Record) -> Placement:
    kind = item.name.rpartition(".")[2]
    if kind in ("Shard", "_StridedShard"):
        factor = count(item.get("split_factor")) if kind == "_StridedShard" else 1
        return Placement("shard", count(item.get("dim")), factor)
    return Placement("replicate" if kind == "Replicate" else "partial")


@lru_cache(maxsize=16)  # all tensors of a file share a few meshes
def _mesh(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """(shape, ranks, coordinate of the writer) of a DeviceMesh."""
    if not isinstance(mesh, Record):
        raise TypeError("a DTensor without a mesh")
    coordinate = mesh.get("_coordinate_on_dim")
    coordinate = counts(coordinate) if coordinate is not None else None
    if isinstance(mesh.get("mesh"), StoredTensor):  # before torch 2.9
        shape = mesh.get("mesh").shape
        ranks = counts(mesh.get("_flatten_mesh_list"), limits().mesh_ranks)
    else:
        axes = _axes(mesh.get("_layout"))
        shape = tuple(len(axis) for axis in axes)
        ranks = _ranks_on(
            axes, counts(mesh.get("_flatten_rank_map"), limits().mesh_ranks), mesh.get("_rank"), coordinate
        )
    if math.prod(shape) != len(ranks) or (coordinate is not None and len(coordinate) != len(shape)):
        raise ValueError(f"a mesh of shape {list(shape)} with {len(ranks)} ranks")
    return shape, ranks, coordinate


def _axes(layout: Any) -> list[list[int]]:
    """For each dimension of a mesh, the offset of each index in the ranks of the root mesh (torch's `_MeshLayout`)."""
    if not isinstance(layout, Record):
        raise TypeError("a mesh without a layout")
    axes = layout.get("axes")
    if axes is None:  # torch 2.9 kept one shape and one stride, nested where a dimension was flattened
        shape, stride = layout.get("shape"), layout.get("stride")
        pairs = [(shape, stride)] if isinstance(shape, int) else list(zip(shape, stride, strict=True))
    else:
        pairs = [(axis.get("shape"), axis.get("stride")) for axis in axes]
    found = [_along(_flat(shape), _flat(stride)) for shape, stride in pairs]
    if math.prod(map(len, found)) > limits().mesh_ranks:
        raise ValueError(f"a mesh of too many ranks; {exceeded('mesh_ranks')}")
    return found


def _flat(value: Any) -> tuple[int, ...]:
    return (count(value),) if isinstance(value, int) else counts(value)


def _along(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    positions = [0]
    for size, step in zip(shape, stride, strict=True):
        if size * len(positions) > limits().mesh_ranks:
            raise ValueError(f"a mesh of too many ranks; {exceeded('mesh_ranks')}")
        positions = [position + index * step for position in positions for index in range(size)]
    return positions


def _ranks_on(axes: list[list[int]], rank_map: tuple[int, ...], rank: Any, coordinate: Any) -> tuple[int, ...]:
    """The ranks of the (sub)mesh that contains the writer; of a mesh without it, those that begin at rank 0."""
    base = 0
    if coordinate is not None and rank in rank_map:
        base = rank_map.index(rank) - sum(axis[index] for axis, index in zip(axes, coordinate, strict=True))
    positions = [base + sum(steps) for steps in itertools.product(*axes)]
    if min(positions, default=0) < 0:
        raise ValueError("a mesh that extends beyond its ranks")
    return tuple(rank_map[position] for position in positions)


def _sharded_tensor(shape: tuple[int, ...], state: Any) -> StoredShards | Unreadable:
    """State: (local shards, ShardedTensorMetadata, process group, sharding spec, whether it uses RPC)."""
    shards, metadata = state[0], state[1]
    if not isinstance(shards, list) or not isinstance(metadata, Record):
        raise TypeError("a ShardedTensor without shards or metadata")
    boxes = tuple(_box(item) for item in metadata.get("shards_metadata"))
    if counts(metadata.get("size")) != shape:
        raise ValueError("a ShardedTensor whose metadata has another shape")
    found = []
    for shard in shards:
        tensor, box = shard.get("tensor"), _box(shard.get("metadata"))
        if isinstance(tensor, Unreadable):
            return tensor
        if not isinstance(tensor, StoredTensor) or tensor.shape != box[1] or box not in boxes:
            raise ValueError("a shard whose tensor does not have the shape in its metadata")
        found.append((box[0], tensor))
    dtype = found[-1][1].dtype if found else from_torch_name(metadata.get("tensor_properties").state[0])
    if any(tensor.dtype != dtype for _, tensor in found):
        raise ValueError("a ShardedTensor whose shards are of several dtypes")
    return StoredShards(dtype, shape, tuple(found), boxes)


def _box(item: Any) -> Box:
    return counts(item.get("shard_offsets")), counts(item.get("shard_sizes"))
