"""`fs.clip_grad_norm_` and `fs.no_sync` on modules that people have wrapped themselves, against one process."""

from __future__ import annotations

import doctest
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError
from fsdp_shard.sharding.gradients import clip_grad_norm_over_meshes
from tests.support.ranks import on_ranks
from tests.support.wrapped_net import WRAPPERS, Net, by_ddp, by_fsdp

_LIMIT = 0.25


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    ids = rows[:, :-1]
    return F.cross_entropy(model(ids).flatten(0, 1), rows[:, 1:].flatten())


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 13, (8, 9), generator=torch.Generator().manual_seed(number))


def part(rows: torch.Tensor, wrapper: str, context: DistributedContext) -> torch.Tensor:
    """The rows of this rank; ranks that divide layers have the same."""
    return rows if wrapper == "by_tensor_parallel" else rows.chunk(context.world_size)[context.rank]


def norms(context: DistributedContext, wrapper: str) -> tuple[float, float]:
    """Before and after clipping."""
    model = WRAPPERS[wrapper](Net(), context)
    loss(model, part(batch(0), wrapper, context)).backward()
    before = fs.clip_grad_norm_(model, _LIMIT)
    return float(before), float(fs.clip_grad_norm_(model, math.inf))


@pytest.mark.parametrize("wrapper", ["by_fully_shard", "by_fsdp", "by_ddp", "by_tensor_parallel"])
def test_the_norm_is_that_of_one_process(wrapper: str) -> None:
    plain = Net()
    loss(plain, batch(0)).backward()
    expected = float(fs.clip_grad_norm_(plain, math.inf))
    assert expected > 2 * _LIMIT
    for before, after in on_ranks(2, norms, wrapper):
        assert before == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(_LIMIT, rel=1e-3)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found: list[Any] = [param.grad for param in model.parameters()]
    return [grad if grad is None else getattr(grad, "_local_tensor", grad).clone() for grad in found]


def accumulated(context: DistributedContext, wrapper: str) -> tuple[Any, Any, Any]:
    """Gradients within `no_sync`, after the step, and with both passes reduced."""
    within, model, other = None, WRAPPERS[wrapper](Net(), context), WRAPPERS[wrapper](Net(), context)
    with fs.no_sync(model):
        loss(model, part(batch(0), wrapper, context)).backward()
        within = gradients(model)
    loss(model, part(batch(1), wrapper, context)).backward()
    for number in range(2):
        loss(other, part(batch(number), wrapper, context)).backward()
    return within, gradients(model), gradients(other)


@pytest.mark.parametrize("wrapper", ["by_fully_shard", "by_fsdp", "by_ddp"])
def test_gradients_are_reduced_once(wrapper: str) -> None:
    first, second = on_ranks(2, accumulated, wrapper)
    for _, once, twice in (first, second):
        for a, b in zip(once, twice, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, atol=1e-6)
    if wrapper == "by_fully_shard":
        assert all(grad is None for grad in first[0]), "nothing was divided among the ranks"
    else:
        assert not torch.equal(first[0][0], second[0][0]), "each rank has its own"


def test_parts_that_are_wrapped() -> None:
    def work(context: DistributedContext) -> None:
        wrapped = nn.Linear(2, 2)
        inner = nn.Sequential(nn.Linear(2, 2), by_ddp(wrapped, context))
        fully_shard(inner[0])
        with fs.no_sync(inner):
            inner(torch.full((1, 2), context.rank + 1.0)).sum().backward()
        assert wrapped.weight.grad is not None
        ours = wrapped.weight.grad.clone()
        context.all_reduce_(summed := ours.double())
        assert not torch.equal(ours.double() * 2, summed)
        half = nn.Sequential(by_fsdp(Net(), context))
        with pytest.raises(ModelError, match="wrap the whole model too"):
            fs.clip_grad_norm_(half, 1.0)

    on_ranks(2, work)


def test_what_shard_gave() -> None:
    def work(context: DistributedContext) -> tuple[bool, float]:
        model = fs.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), context, param_dtype="float32", min_params=4)
        with fs.no_sync(model):
            model.module(torch.ones(1, 4)).sum().backward()
        unreduced = all(param.grad is None for param in model.module.parameters())
        model.module(torch.ones(1, 4)).sum().backward()
        return unreduced, float(fs.clip_grad_norm_(model, 1.0))

    for unreduced, norm in on_ranks(2, work):
        assert unreduced
        assert norm > 1


def test_without_gradients_the_norm_is_zero() -> None:
    def work(context: DistributedContext) -> float:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=context.mesh)
        return float(fs.clip_grad_norm_(model, 1.0))

    assert on_ranks(2, work) == [0.0, 0.0]


def _norm_of_mixed_placements(context: DistributedContext) -> tuple[float, list[str]]:
    """As under tensor parallelism: some gradients are divided over both dimensions, others are whole in one."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    params, said = [], []
    for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
        params.append(nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements)))
        params[-1].grad = distribute_tensor(torch.full((4, 4), 3.0), mesh, placements)
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(lambda record: said.append(record.getMessage()) is not None)
    return float(clip_grad_norm_over_meshes(params, math.inf)), said


def test_a_norm_under_tensor_parallelism_is_exact_and_warns_of_nothing() -> None:
    assert on_ranks(2, _norm_of_mixed_placements) == [(pytest.approx(32**0.5 * 3), [])] * 2


@pytest.mark.parametrize("name", ["clip_grad_norm_", "no_sync"])
def test_the_examples_in_the_docs_run(name: str) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(fs, name), name, globs={})
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0
