"""`Checkpointer` in loops of people's own: whoever wrapped the model, any optimizer, any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from tests.support.ranks import on_ranks
from tests.support.tiny import token_batch

_STEPS = 6  # three before the save, three after it


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
    return model


def by_fully_shard(model: nn.Module, context: DistributedContext) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def by_fsdp(model: nn.Module, context: DistributedContext) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated; on one rank it shards nothing
        cpu = torch.device("cpu")
        policy = ModuleWrapPolicy({Block})
        return fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)


def by_ddp(model: nn.Module, context: DistributedContext) -> nn.Module:
    return DistributedDataParallel(model)


def by_tensor_parallel(model: nn.Module, context: DistributedContext) -> nn.Module:
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


WRAPPERS = {one.__name__: one for one in (by_nobody, by_fully_shard, by_fsdp, by_ddp, by_tensor_parallel)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def run(
    context: DistributedContext, path: Path, wrapper: str, optimizer_name: str, last: int, layout: str = "sharded"
) -> list[float]:
    """Restore, train to `last` and save; the losses, of the same batch for any number of ranks."""
    model = WRAPPERS[wrapper](Net(), context)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, T_max=_STEPS)
    losses = []
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, of names that it uses itself
    with fs.Checkpointer(path, asynchronous=False, layout=layout) as checkpointer:
        restored = checkpointer.restore(model, optimizer, scheduler=scheduler)
        for step in range(restored.step + 1 if restored else 1, last + 1):
            ids = token_batch(step, 6, 5, 13)
            if wrapper in ("by_fully_shard", "by_fsdp", "by_ddp"):
                ids = ids.chunk(context.world_size)[context.rank]
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            losses.append(context.all_reduce([float(loss.detach())])[0] / context.world_size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if not restored or restored.step < last:
            checkpointer.save(last, model, optimizer, scheduler=scheduler, extra={"seen": last})
        assert checkpointer.latest == last
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_losses_after_a_restore_are_those_of_one_run(wrapper: str, optimizer: str, tmp_path: Path) -> None:
    if wrapper == "by_tensor_parallel" and optimizer in ("adamw_foreach", "adamw_fused", "adafactor"):
        pytest.skip("torch's kernels do not take parameters of which only some are DTensors")
    if wrapper == "by_fully_shard" and optimizer == "adafactor":
        pytest.skip("torch's Adafactor does not take DTensors")
    whole = on_ranks(2, run, tmp_path / "whole", wrapper, optimizer, _STEPS)[0]
    on_ranks(2, run, tmp_path / "parts", wrapper, optimizer, 2)
    again = on_ranks(2, run, tmp_path / "parts", wrapper, optimizer, 3)[0]
    assert again == whole[2:3], "on as many ranks"
    few = on_ranks(1, run, tmp_path / "parts", wrapper, optimizer, 4)[0]
    many = on_ranks(3, run, tmp_path / "parts", wrapper, optimizer, _STEPS)[0]
    assert few + many == pytest.approx(whole[3:], abs=1e-6)
