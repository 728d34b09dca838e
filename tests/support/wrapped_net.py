"""A small network of one's own, and the ways in which people wrap it with torch."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_shard.distributed import DistributedContext


class Block(nn.Module):
    """Two layers that can be cut by columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Net(nn.Module):
    """Two blocks, a norm, a tied head and a buffer."""

    num_calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).float()


def by_nobody(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Left as it is."""
    return model


def by_fully_shard(model: nn.Module, context: DistributedContext) -> nn.Module:
    """FSDP2, each block for itself."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


def by_fsdp(model: nn.Module, context: DistributedContext) -> nn.Module:
    """FSDP1, each block for itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated; on one rank it shards nothing
        cpu = torch.device("cpu")
        policy = ModuleWrapPolicy({Block})
        return fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)


def by_ddp(model: nn.Module, context: DistributedContext) -> nn.Module:
    """DDP."""
    return DistributedDataParallel(model)


def by_tensor_parallel(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Blocks divided by columns and rows over all ranks."""
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


WRAPPERS = {one.__name__: one for one in (by_nobody, by_fully_shard, by_fsdp, by_ddp, by_tensor_parallel)}
