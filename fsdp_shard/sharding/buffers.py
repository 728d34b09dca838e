"""Buffers that a checkpoint holds: every rank has them whole, the first rank writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.sharding.activations import clean_fqn
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    from torch import nn

    from fsdp_shard.distributed import DistributedContext


def buffer_shards(module: nn.Module, context: DistributedContext) -> dict[str, LocalShard]:
    """A LocalShard over the whole of each persistent buffer."""
    return {
        clean_fqn(f"{prefix}.{name}" if prefix else name): LocalShard(
            buffer, buffer.detach().reshape(-1), 0, tuple(buffer.shape), writes=context.is_main
        )
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
