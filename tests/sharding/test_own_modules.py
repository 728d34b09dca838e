"""`fsdp_shard.shard` on modules that people bring: on meta, without blocks, with batch norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model, token_batch


def test_a_model_on_meta_computes_as_the_one_that_is_loaded(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", seed=3)

    def logits(context: DistributedContext) -> torch.Tensor:
        with torch.device("meta"):
            model = llama()
        sharded = fs.shard(model, context, param_dtype="float32")
        fs.load_weights(sharded.module, source)
        with torch.no_grad():
            return sharded.module(token_batch(0, 2, 5)).logits

    assert torch.equal(on_ranks(2, logits)[0], llama(3)(token_batch(0, 2, 5)).logits)


def test_a_model_without_blocks() -> None:
    def shard(context: DistributedContext) -> None:
        layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(ModelError, match=r"no module repeats.* shard.min_params=40: .* a unit of Linear"):
            fs.shard(layers, context, param_dtype="float32")
        with pytest.raises(ModelError, match="It has no parameters"):
            fs.shard(nn.Sequential(nn.ReLU()), context, param_dtype="float32")
        sharded = fs.shard(layers, context, param_dtype="float32", min_params=40)
        assert sharded.module(torch.ones(1, 4)).shape == (1, 2)

    on_ranks(2, shard)


def test_statistics_of_each_rank_are_told() -> None:
    def shard(context: DistributedContext) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        with pytest.warns(UserWarning, match="BatchNorm2d of Sequential keep the statistics of each rank's own"):
            fs.shard(model, context, param_dtype="float32", min_params=1)

    on_ranks(2, shard)
