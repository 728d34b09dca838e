"""Gradients of sharded parameters: clipping by the global norm, and backward passes without reduction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.sharding.config import ShardedModel
from fsdp_shard.sharding.module_shards import free_gathered, without_wrappers


def clip_grad_norm_(model: nn.Module | ShardedModel, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`; a collective.

    torch's own function uses only a rank's own norm under FullyShardedDataParallel, and rejects parameters on several
    meshes.

    Args:
        model: The model, plain or wrapped in any way (DDP, FSDP1, `fully_shard`, tensor-parallel), or a result of
            `shard`.
        max_norm: The maximum norm; infinity only measures the norm.

    Returns:
        The norm before clipping, a scalar [], equal on all ranks.

    Raises:
        ConfigError: `max_norm` is negative or NaN, or `model` is not a model, but for example its parameters.
        ModelError: Parts of the model are in FullyShardedDataParallel, but the whole is not.

    Example:
        >>> import torch, fsdp_shard as fs
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model(torch.full((1, 1), 3.0)).sum().backward()
        >>> fs.clip_grad_norm_(model, max_norm=1.0)
        tensor(3.)
    """
    if not max_norm >= 0.0:
        raise ConfigError(f"max_norm={max_norm} is not a norm: give a number of at least 0.")
    if not isinstance(model, nn.Module) and not hasattr(model, "clip_grad_norm_"):
        raise ConfigError(
            f"clip_grad_norm_ takes the model, not {type(model).__name__}: the norm is that of all ranks."
        )
    if not isinstance(model, nn.Module):
        return model.clip_grad_norm_(max_norm)
    model = without_wrappers(model)
    free_gathered(model)  # after a pass without a backward pass, gathered parameters have no gradients
    if FullyShardedDataParallel.fsdp_modules(model):
        if not isinstance(model, FullyShardedDataParallel):
            raise ModelError(
                f"{type(model).__name__} has modules in FullyShardedDataParallel, but is not in one itself, so their "
                f"gradients have no common norm; wrap the whole model too."
            )
        return model.clip_grad_norm_(max_norm)
    meshes = {getattr(param, "device_mesh", None) for param in model.parameters()}
    if meshes == {None}:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return clip_grad_norm_over_meshes(model.parameters(), max_norm)


def no_sync(model: nn.Module | ShardedModel) -> AbstractContextManager[None]:
    """Keep the gradients of backward passes within the block on this rank, unreduced, like DDP's `no_sync`.

    Args:
        model: The model, wrapped in any way, or a result of `shard`.

    Returns:
        A context manager. The next backward pass after it reduces the accumulated gradients.

    Example:
        >>> import torch, fsdp_shard as fs
        >>> model = torch.nn.Linear(1, 1)
        >>> with fs.no_sync(model):
        ...     model(torch.ones(1, 1)).sum().backward()
    """
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        return model.no_sync()
    return _no_sync_of_parts(model)


@contextmanager
def _no_sync_of_parts(model: nn.Module) -> Iterator[None]:
    """Apply `no_sync` of all `fully_shard` modules, and of nested wrapped modules."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    with ExitStack() as stack:
        for module in [*wrapped, *FullyShardedDataParallel.fsdp_modules(model, root_only=True)]:
            stack.enter_context(module.no_sync())  # type: ignore[operator]  # of either wrapper
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)


def clip_grad_norm_over_meshes(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """`clip_grad_norm_` for parameters on several meshes, or on none, which torch's own function does not support."""
    parameters = list(parameters)
    groups = by_mesh(param for param in parameters if param.grad is not None)
    if not groups:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    squares = [_squared_norm([grad for param in its if (grad := param.grad) is not None]) for its in groups.values()]
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    for members in groups.values():  # a foreach kernel supports one mesh per call
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _squared_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of `grads`, all on one mesh, over all ranks."""
    by_placements: dict[tuple[Placement, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_placements.setdefault(grad.placements if isinstance(grad, DTensor) else (), []).append(grad)
    if len(by_placements) > 1:  # under tensor parallelism; torch's norm would warn that ranks may have other results
        return torch.stack([_squared_local_norm(its) for its in by_placements.values()]).sum()
    norm = torch.nn.utils.get_total_norm(grads)
    if not isinstance(norm, DTensor):
        return norm.square()
    square = norm.to_local().square()
    for dim, placement in enumerate(norm.placements):  # like `full_tensor`, but without its warning
        if placement.is_partial():
            dist.all_reduce(square, group=norm.device_mesh.get_group(dim))
    return square


def _squared_local_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of `grads`, DTensors that are divided in the same way, over all ranks."""
    first = grads[0]
    assert isinstance(first, DTensor)
    square = torch.nn.utils.get_total_norm([g.to_local() for g in grads if isinstance(g, DTensor)]).square()
    for dim, placement in enumerate(first.placements):
        if not placement.is_replicate():
            dist.all_reduce(square, group=first.device_mesh.get_group(dim))
    return square


def by_mesh(tensors: Iterable[torch.Tensor]) -> Mapping[Any, list[torch.Tensor]]:
    """Group `tensors` by the mesh over which they are sharded."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return groups


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Put parameters on different meshes into separate groups: a fused kernel supports one mesh per call."""
    groups = [(group, members) for group in optimizer.param_groups for members in by_mesh(group["params"]).values()]
    optimizer.param_groups = [{**group, "params": members} for group, members in groups]
