"""Checks that the tensors of a checkpoint match a module in names, shapes and kinds of numbers."""

from fsdp_shard.checkpoint import TensorIndex, has_same_bytes, may_cast, to_torch
from fsdp_shard.errors import CheckpointError
from fsdp_shard.sharding import ModuleShards


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
