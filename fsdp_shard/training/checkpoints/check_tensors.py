"""Checks that the tensors of a checkpoint match a module in names, shapes, kinds of numbers, and shared memory."""

from collections.abc import Mapping

import torch

from fsdp_shard.checkpoint import TensorIndex, has_same_bytes, may_cast, tensor_bytes, to_torch
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError
from fsdp_shard.sharding import ModuleShards

_COMPARED_AT_ONCE = 1 << 22  # elements


def check_tensors(index: TensorIndex, shards: ModuleShards) -> None:
    """Raise CheckpointError unless `index` has exactly a module's tensors, tied ones under any of their names."""
    known = {*index.tensors, *index.aliases}
    missing = sorted(name for name in shards.shards if name not in known)
    unknown = sorted(index.tensors.keys() - shards.shards.keys() - shards.aliases.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model does not have"
        raise CheckpointError(
            f"{index.root} {what} ({len(missing)} tensors missing, {len(unknown)} not expected of {len(index.names)}); "
            f"expected the names of model.named_parameters()."
        )
    for name, shard in shards.shards.items():
        entry = index.entry(name)
        if entry.shape != shard.shape:
            raise CheckpointError(f"{index.root}: {name} has shape {list(entry.shape)}, expected {list(shard.shape)}.")
        if not may_cast(to_torch(entry.dtype), shard.data.dtype):
            raise CheckpointError(f"{index.root}: {name} is stored as {entry.dtype}, expected {shard.data.dtype}.")
    for alias, kept in shards.aliases.items():
        if alias in index.tensors and not has_same_bytes(index, kept, alias):
            raise CheckpointError(
                f"{index.root} has {kept} and {alias} with different values, and the model ties them."
            )
    check_shared_memory(index, shards.shards, {name: name for name in shards.shards})


def check_shared_memory(index: TensorIndex, shards: Mapping[str, LocalShard], names: Mapping[str, str]) -> None:
    """Raise CheckpointError if different values are stored for shards that share memory: the last would be kept.

    Such are the layers that two models share, a buffer with two names, and views of one tensor. Only what is shared is
    read. `names` maps each name in `shards` to that in `index`.
    """
    before: list[str] = []  # those that end after the current one begins
    for start, name in sorted((shard.data.data_ptr(), name) for name, shard in shards.items() if shard.data.numel()):
        before = [other for other in before if _end(shards[other].data) > start]
        for other in before:
            if not _has_same_values(index, (names[other], names[name]), (shards[other], shards[name])):
                raise CheckpointError(
                    f"{index.root} has {names[other]} and {names[name]} with different values, and they share memory "
                    f"in the model; give each its own, as when they were saved."
                )
        before.append(name)


def _has_same_values(index: TensorIndex, names: tuple[str, str], shards: tuple[LocalShard, LocalShard]) -> bool:
    """Whether two tensors would write the same bytes into the memory that their shards share."""
    first, second = shards
    places = [(shard.data.data_ptr(), shard.start, shard.box) for shard in shards]
    if places[0] == places[1] and index.entry(names[0]).name == index.entry(names[1]).name:
        return True
    dtype, size = first.data.dtype, first.data.element_size()
    if dtype != second.data.dtype:  # bits of one as numbers of another: there are no common elements
        return True
    low, high = second.data.data_ptr(), min(_end(first.data), _end(second.data))
    count = (high - low) // size
    step = _COMPARED_AT_ONCE if first.box is second.box is None else count
    for at in range(0, count, step):
        one, other = (
            _stored(index, name, shard, (low - shard.data.data_ptr()) // size + at, min(step, count - at)).to(dtype)
            for name, shard in zip(names, shards, strict=True)
        )
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):  # NaN equals NaN
            return False
    return True


def _stored(index: TensorIndex, name: str, shard: LocalShard, start: int, count: int) -> torch.Tensor:
    """The stored values of `count` elements of a shard from element `start` of its memory."""
    if shard.box is not None:
        box = tuple(slice(at, at + size) for at, size in zip(*shard.box, strict=True))
        return index.read(name, box).reshape(-1)[start : start + count]
    values = torch.empty(count, dtype=to_torch(index.entry(name).dtype), device="cpu")
    index.read_into(name, shard.start + start, tensor_bytes(values))
    return values


def _end(data: torch.Tensor) -> int:
    return data.data_ptr() + data.numel() * data.element_size()
