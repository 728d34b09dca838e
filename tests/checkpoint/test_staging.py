from __future__ import annotations

import torch
from torch import nn

from fsdp_shard.checkpoint.staging import Staging
from fsdp_shard.checkpoint.state import RunState
from fsdp_shard.shards import LocalShard


def shard(tensor: torch.Tensor, *, writes: bool = True) -> LocalShard:
    return LocalShard(tensor, tensor.detach().view(-1), 0, tuple(tensor.shape), writes)


def test_buffers_are_copied_at_once_and_the_rest_before_it_may_change() -> None:
    weight, buffer = nn.Parameter(torch.arange(10.0)), torch.ones(3, dtype=torch.bfloat16)
    step, other = torch.tensor(5.0), nn.Parameter(torch.ones(100))
    state = RunState(
        {"weight": shard(weight), "buffer": shard(buffer), "other": shard(other, writes=False)},
        {},
        {"weight.step": shard(step)},
        {"step": 5},
    )
    staging = Staging()
    staged, copy = staging.stage(state)
    buffer.zero_()
    copy.run()
    copy.settle()
    with torch.no_grad():
        weight.zero_()
    step.zero_()
    assert torch.equal(staged.weights["weight"].data, torch.arange(10.0))
    assert torch.equal(staged.weights["buffer"].data, torch.ones(3, dtype=torch.bfloat16)), (
        "a forward pass may change it"
    )
    assert staged.optimizer["weight.step"].data.tolist() == [5.0]
    assert len(staged.weights["other"].data) == 0, "another rank writes it, so it takes no memory"
    assert (staged.weights["weight"].shape, staged.trainer) == ((10,), {"step": 5})

    again, copy = staging.stage(state)
    copy.run()
    assert again.weights["weight"].data.data_ptr() == staged.weights["weight"].data.data_ptr(), "the memory is reused"
    assert not again.weights["weight"].data.any()
