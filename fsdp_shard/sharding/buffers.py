"""Buffers that a checkpoint holds: every rank has them whole, the first rank writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.sharding.activations import clean_fqn
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch
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


def materialise_buffers(module: nn.Module, device: torch.device) -> None:
    """Give persistent buffers that are still on meta memory on `device`, unfilled."""
    import torch

    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
