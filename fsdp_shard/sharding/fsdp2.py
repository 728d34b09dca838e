"""`shard=fsdp2`: torch's `fully_shard`, parameters as DTensors with their rows divided over the ranks."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import expert_parallel, tensor_parallel
from fsdp_shard.sharding.activation_checkpointing import clean_fqn
from fsdp_shard.sharding.config import Shape, ShardConfig, ShardedModel, Unit
from fsdp_shard.sharding.prepare_model import buffer_shards, prepare_model
from fsdp_shard.utils import local_shape_and_offset, replace_tensors


@dataclass(frozen=True)
class Fsdp2Model:
    """A model under `fully_shard`."""

    module: nn.Module
    context: DistributedContext
    shard_mesh_dim = "shard"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]  # added by fully_shard
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)  # type: ignore[operator]  # added by fully_shard

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        if self.context.divides_modules:
            return tensor_parallel.clip_grads(self.module.parameters(), max_norm)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local_shards(self) -> dict[str, LocalShard]:
        for module in _fsdp_modules(self.module):
            module.reshard()  # gathered parameters are left after a forward pass without a backward pass
        mesh = self.context.mesh
        is_first_replica = mesh.get_local_rank("replicate") == 0
        is_first_divided = mesh.ndim <= 2 or mesh.get_local_rank("tensor") == 0
        box = cache(local_shape_and_offset)  # slow, and blocks have the same parameters
        params = {}
        for name, param in self.module.named_parameters():
            assert isinstance(param, DTensor)
            writes = is_first_replica and (is_first_divided or tensor_parallel.is_divided(param))
            params[clean_fqn(name)] = tensor_parallel.local_shard(param, writes=writes, box=box)
        return params | buffer_shards(self.module, self.context)


def check_supported(model: nn.Module, settings: ShardConfig) -> None:
    """Raise ConfigError when layers or experts of `model` cannot be divided as asked, or a parameter is a scalar."""
    if settings.tensor_parallel > 1:
        tensor_parallel.check_tensor_parallel(model, settings.tensor_parallel)
    if settings.expert_parallel > 1:
        expert_parallel.check_experts(model, settings.expert_parallel)
    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise ConfigError(
                f"shard=fsdp2 cannot shard the scalar parameter {name}, which torch refuses; use shard=fsdp1."
            )


def local_shapes(shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
    """The rows of each parameter for each shard: cut as `torch.chunk` does, so the last may hold less or nothing."""
    return [{name: _rows(shape, num_shards, index) for name, shape in shapes.items()} for index in range(num_shards)]


def _rows(shape: Shape, num_shards: int, index: int) -> Shape:
    if not shape:
        return (1,) if index == 0 else (0,)
    per_shard = -(-shape[0] // num_shards)
    return (len(range(shape[0])[index * per_shard : (index + 1) * per_shard]), *shape[1:])


def shard(model: nn.Module, settings: ShardConfig, context: DistributedContext) -> ShardedModel:
    """Apply `fully_shard` to each unit of `model` and to the root."""
    *inner, root = prepare_model(model, settings, context)
    pin_memory = context.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": _mesh(settings, context.mesh),
        "reshard_after_forward": settings.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory) if settings.cpu_offload else OffloadPolicy(),
    }
    experts = _divide(model, settings, context, options)
    for unit in (unit for unit in inner if unit.fqn not in experts):
        fully_shard(model.get_submodule(unit.fqn), mp_policy=_precision(unit.dtype, settings), **options)
    # The root's parameters are used last in the forward pass and first in the backward pass: freeing them between
    # would only gather them twice.
    fully_shard(model, mp_policy=_precision(root.dtype, settings), **(options | {"reshard_after_forward": False}))
    _prefetch(_fsdp_modules(model)[1:], settings)  # all but the root
    device = torch.device("cpu") if settings.cpu_offload else context.device
    replace_tensors(model, lambda t: torch.empty_like(t, device=device) if t.is_meta else t, buffers=False)
    # Converts nothing, but lets FSDP2 pad its uneven shards now: in the first forward pass it would replace their
    # memory, and `LocalShard`s from before would keep the old one.
    model.to()
    return Fsdp2Model(model, context)


def _divide(
    model: nn.Module, settings: ShardConfig, context: DistributedContext, options: Mapping[str, Any]
) -> Collection[str]:
    """Divide layers or experts of `model` over neighboring ranks; returns the FQNs of the modules with experts."""
    if settings.tensor_parallel > 1:
        tensor_parallel.apply_tensor_parallel(model, context.mesh["tensor"])
        # Logits of divided heads are a view of what was gathered; nothing here changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    if settings.expert_parallel == 1:
        return ()
    assert context.expert_mesh is not None
    assert context.num_expert_ranks == settings.expert_parallel
    experts = expert_parallel.divide_experts(model, context)
    # Inputs keep the dtype that the block around them chose: routing weights may be wider.
    policy = replace(_precision(settings.param_dtype, settings), cast_forward_inputs=False)
    mesh = _mesh(settings, context.expert_mesh)
    expert_parallel.shard_experts(experts.values(), context, {**options, "mesh": mesh, "mp_policy": policy})
    return experts


def _mesh(settings: ShardConfig, mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of `mesh` over which parameters are gathered and gradients are reduced."""
    return mesh["replicate", "shard"] if settings.replicas > 1 else mesh["shard"]


def _precision(dtype: str, settings: ShardConfig) -> MixedPrecisionPolicy:
    """The dtypes of a unit that computes in `dtype`; one that differs from those around it returns theirs."""
    output = None if dtype == settings.param_dtype else getattr(torch, settings.param_dtype)
    return MixedPrecisionPolicy(getattr(torch, dtype), getattr(torch, settings.reduce_dtype), output)


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _prefetch(units: Sequence[FSDPModule], settings: ShardConfig) -> None:
    """Set for each of `units`, in the order in which they run, which ones to prefetch."""
    backwards = units[::-1]
    for number in range(len(units)):
        if ahead := units[number + 1 : number + 1 + (settings.prefetch_forward or 0)]:
            units[number].set_modules_to_forward_prefetch(list(ahead))
        if ahead := backwards[number + 1 : number + 1 + (settings.prefetch_backward or 0)]:
            backwards[number].set_modules_to_backward_prefetch(list(ahead))
