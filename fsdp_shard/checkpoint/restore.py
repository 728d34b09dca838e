"""Ranges of stored tensors into the memory of a rank's shards. Reads nothing else of the files; knows no other rank."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_shard.checkpoint import dtypes
from fsdp_shard.checkpoint.index import TensorIndex, tensor_bytes
from fsdp_shard.shards import LocalShard

_STAGE_BYTES = 16 << 20  # read at a time where the dtype or the device differs


def load_shards(index: TensorIndex, shards: Mapping[str, LocalShard], names: Mapping[str, str] | None = None) -> None:
    """Fill each shard's own memory with its range, cast where the dtypes differ; touches nothing else of the files.

    `names` maps a shard's name to the one in `index`, where they differ.
    """
    for name, shard in shards.items():
        stored = names[name] if names is not None else name
        assert index.entry(stored).shape == shard.shape, name
        _load_range(index, stored, shard)


def _load_range(index: TensorIndex, stored: str, shard: LocalShard) -> None:
    import torch

    if shard.box is not None:
        part = index.read(stored, [slice(at, at + size) for at, size in zip(*shard.box, strict=True)])
        shard.data.copy_(part.reshape(-1))
        return
    dtype = dtypes.to_torch(index.entry(stored).dtype)
    if dtype == shard.data.dtype and shard.data.device.type == "cpu":
        if len(shard.data):
            index.read_into(stored, shard.start, tensor_bytes(shard.data))
        return
    per_stage = _STAGE_BYTES // dtype.itemsize
    stage = torch.empty(min(per_stage, len(shard.data)), dtype=dtype)
    for start in range(0, len(shard.data), per_stage):
        part = stage[: min(per_stage, len(shard.data) - start)]
        index.read_into(stored, shard.start + start, tensor_bytes(part))
        shard.data[start : start + len(part)].copy_(part)
