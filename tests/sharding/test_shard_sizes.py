"""Each rank's part of each parameter, as planned and as torch really cuts it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding.config import ShardConfig, Unit
from fsdp_shard.sharding.registry import Fsdp1Config, Fsdp2Config
from fsdp_shard.sharding.wrap_policy import plan_units
from tests.support.ranks import on_ranks
from tests.support.tiny import llama_config

SHAPES = {"a": (7, 3), "b": (2,), "c": (1, 5, 2), "d": (8, 1)}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 9])
def test_rows_are_cut_as_torch_chunk_does(num_shards: int) -> None:
    shares = Fsdp2Config().local_shapes(SHAPES, [], num_shards)
    for name, shape in SHAPES.items():
        chunks = [tuple(chunk.shape) for chunk in torch.empty(shape).chunk(num_shards)]
        chunks += [(0, *shape[1:])] * (num_shards - len(chunks))
        assert [share[name] for share in shares] == chunks


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_flat_parts_of_a_unit_are_even_and_complete(num_shards: int) -> None:
    units = [Unit("", "Linear", names, 0, 0, "float32", 0, 0) for names in (("a", "b"), ("c", "d"))]
    shares = Fsdp1Config().local_shapes(SHAPES, units, num_shards)
    for name, shape in SHAPES.items():
        assert sum(prod(share[name]) for share in shares) == prod(shape)
    totals = [sum(prod(shape) for shape in share.values()) for share in shares]
    assert len(set(totals)) == 1


def local_elements(context: DistributedContext, shard: ShardConfig) -> dict[str, int]:
    """What the wrapper really gives this rank, by parameter; and the memory of its flat parts with their padding."""
    model = build_on_meta(llama_config(), "float32")
    rebuild_buffers(model, context.device)
    sharded = shard.shard(model, context)
    found = {name: part.data.numel() for name, part in sharded.local_shards().items()}
    handles: list[Any] = [
        unit._handle for unit in sharded.module.modules() if getattr(unit, "_handle", None) is not None
    ]
    memory = [handle.flat_param.untyped_storage().nbytes() // 4 for handle in handles]
    return found | {"memory": sum(memory)}


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shard", [Fsdp2Config(), Fsdp1Config(), Fsdp1Config(param_dtype="float32")])
def test_the_wrappers_cut_as_planned(shard: ShardConfig, num_ranks: int) -> None:
    model = build_on_meta(llama_config(), "float32")
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    shares = shard.local_shapes(shapes, plan_units(model, shard), num_ranks)
    for share, real in zip(shares, on_ranks(num_ranks, local_elements, shard), strict=True):
        assert {name: prod(shape) for name, shape in share.items() if name in shapes} == {n: real[n] for n in shapes}
        if isinstance(shard, Fsdp1Config):
            assert sum(prod(shape) for shape in share.values()) == real["memory"]
