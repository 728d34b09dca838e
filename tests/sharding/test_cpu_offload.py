"""`shard=fsdp1` with `shard.cpu_offload`: its shards stay in the memory that they are in from the beginning.

Page-locking is stood in for, as it needs a GPU: memory that is not locked is copied, as torch does.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding.module_shards import free_gathered
from fsdp_shard.sharding.registry import Fsdp1Config
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import llama, token_batch


def run_twice(context: DistributedContext) -> tuple[set[str], list[float]]:
    """The shards that a forward pass leaves elsewhere; the loss, and the loss of twice the values that were there."""
    locked: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        if any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in locked):
            return tensor
        locked.append(tensor.clone())
        return locked[-1]

    def loss() -> float:
        tokens = token_batch(0)
        with torch.no_grad():
            found = float(model.module(input_ids=tokens, labels=tokens, use_cache=False).loss)
        free_gathered(model.module)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        model = sharded(Fsdp1Config(cpu_offload=True, param_dtype="float32"), context)
        before = model.local_shards()
        losses = [loss()]
        after = model.local_shards()
        for shard in before.values():
            shard.data.mul_(2)
        losses.append(loss())
    elsewhere = {name for name, shard in after.items() if shard.data.data_ptr() != before[name].data.data_ptr()}
    return elsewhere, losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_stay_where_they_are_page_locked(ranks: int) -> None:
    plain = llama()
    tokens = token_batch(0)
    with torch.no_grad():
        expected = float(plain(input_ids=tokens, labels=tokens).loss)
    for elsewhere, (first, second) in on_ranks(ranks, run_twice):
        assert elsewhere == set()
        assert first == pytest.approx(expected, rel=1e-6)
        assert second != pytest.approx(expected, rel=1e-3)


def has_no_sync_of_torch(context: DistributedContext) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        model = sharded(Fsdp1Config(cpu_offload=True, param_dtype="float32"), context)
    return not isinstance(model.no_sync(), nullcontext)


def test_offloaded_gradients_add_up_without_synchronization_also_on_one_rank() -> None:
    """With it, torch would copy each micro-batch's gradients over those of the one before."""
    assert on_ranks(1, has_no_sync_of_torch) == [True]
