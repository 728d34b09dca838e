"""`Checkpointer` with torchao's AdamW in 8 bits, in a loop of one's own: of a whole model, and of a sharded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import FsdpShardError
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
_STEPS = 6


def _run(context: DistributedContext, path: Path, last: int, sharded: bool) -> list[float]:
    """Restore, train to `last` and save; the losses, of the same batch for any number of ranks."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model = fully_shard(model) if sharded else DistributedDataParallel(model)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    losses = []
    with torch.compiler.set_stance("force_eager"), fs.Checkpointer(path, asynchronous=False) as checkpointer:
        restored = checkpointer.restore(model, optimizer)
        for step in range(restored.step + 1 if restored else 1, last + 1):
            rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(step))
            loss = model(rows.chunk(context.world_size)[context.rank]).pow(2).mean()
            losses.append(context.all_reduce([float(loss.detach())])[0] / context.world_size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.save(last, model, optimizer)
    kept = next(iter(optimizer.state.values()))["exp_avg"]
    assert hasattr(kept, "codes") or sharded, "the state is quantized"
    return losses


def test_losses_after_a_restore_are_those_of_one_run(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    whole = on_ranks(2, _run, tmp_path / "whole", _STEPS, False)[0]
    on_ranks(2, _run, tmp_path / "parts", 2, False)
    again = on_ranks(2, _run, tmp_path / "parts", 3, False)[0]
    assert again == whole[2:3], "on as many ranks"
    few = on_ranks(1, _run, tmp_path / "parts", 4, False)[0]
    many = on_ranks(3, _run, tmp_path / "parts", _STEPS, False)[0]
    assert few + many == pytest.approx(whole[3:], abs=1e-6)


def test_blocks_of_a_rank_are_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torchao")

    def refused(context: DistributedContext) -> str:
        with pytest.raises(FsdpShardError) as caught:
            _run(context, tmp_path, 2, True)
        return str(caught.value)

    for message in on_ranks(2, refused):
        assert "keeps 0.weight.exp_avg as OptimState8bit, which quantizes the elements of a rank together" in message
    assert not list(tmp_path.glob("checkpoints/step-*"))
