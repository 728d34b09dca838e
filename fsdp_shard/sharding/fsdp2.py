"""`shard=fsdp2`: torch's `fully_shard`, parameters as DTensors with their rows divided over the ranks."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import expert_parallel, tensor_parallel
from fsdp_shard.sharding.config import Shape, ShardConfig, ShardedModel, Unit
from fsdp_shard.sharding.forward_trace import trace_forward
from fsdp_shard.sharding.gradients import clip_grad_norm_over_meshes
from fsdp_shard.sharding.module_shards import free_gathered, shards_of
from fsdp_shard.sharding.prepare_model import prepare_model
from fsdp_shard.sharding.routed_lists import complete_gradients, is_within, skippable_modules
from fsdp_shard.utils import at_end_of_backward, copy_to, replace_tensors, reshard_over, tree_leaves

_REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # from torch 2.13 on


@dataclass(frozen=True)
class Fsdp2Model:
    """A model under `fully_shard`."""

    module: nn.Module
    context: DistributedContext
    scalars: "_Scalars"
    shard_mesh_dim = "shard"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]  # added by fully_shard
        self.scalars.is_synced = False
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)  # type: ignore[operator]  # added by fully_shard
            self.scalars.is_synced = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        free_gathered(self.module)  # after a pass without a backward pass, gathered parameters have no gradients
        if self.context.divides_modules or self.scalars.trained:
            return clip_grad_norm_over_meshes(self.module.parameters(), max_norm)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local_shards(self) -> dict[str, LocalShard]:
        return shards_of(self.module, self.context).shards


class _Scalars:
    """Scalar parameters, which `fully_shard` refuses: each rank has them whole, and their gradients are averaged.

    All are averaged together at the end of a backward pass: a rank may use other scalars than the others, or none.

    Attributes:
        trained: Those that are not frozen.
        is_synced: Whether the next backward pass averages their gradients over the ranks.
    """

    def __init__(self, model: nn.Module, reduce_dtype: torch.dtype) -> None:
        self.trained = [param for param in model.parameters() if param.requires_grad and not param.ndim]
        self.is_synced = True
        self._dtype, self._is_queued = reduce_dtype, False
        for param in self.trained:
            param.register_post_accumulate_grad_hook(self._average_at_end)
        if self.trained:
            model.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_queued = False  # a backward pass that failed did not average
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._average_at_end)

    def _average_at_end(self, _: torch.Tensor) -> None:
        if self.is_synced and not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._average)

    def _average(self) -> None:
        """Average the gradients over the ranks.

        Those accumulated under `no_sync` are this rank's own. Averages of earlier passes are equal on all ranks, so
        averaging them again keeps them.
        """
        self._is_queued = False
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.trained]
        is_used = [float(param.grad is not None) for param in self.trained]
        total = torch.stack([grad.to(self._dtype) for grad in grads])
        sums = torch.stack([total, copy_to(total.device, torch.tensor(is_used, dtype=total.dtype))])
        dist.all_reduce(sums)
        means = sums[0] / dist.get_world_size()
        for param, mean, num_users in zip(self.trained, means, sums[1].tolist(), strict=True):
            if num_users:
                param.grad = mean.to(param.dtype)


def check_supported(model: nn.Module, settings: ShardConfig) -> None:
    """Check that `model` works under `fully_shard` with these settings.

    Raises:
        ConfigError: Its layers or experts cannot be divided, its forward pass converts a gathered parameter to another
            dtype, or it has scalar parameters and ranks that divide modules.
    """
    if settings.tensor_parallel > 1:
        tensor_parallel.check_tensor_parallel(model, settings.tensor_parallel)
    if settings.expert_parallel > 1:
        expert_parallel.check_experts(model, settings.expert_parallel)
    for name, dtype in trace_forward(model).converted.items():
        if dtype != settings.param_dtype:  # a parameter that was gathered must stay what it is
            raise ConfigError(
                f"shard.param_dtype={settings.param_dtype} cannot be used with {type(model).__name__} under "
                f"shard=fsdp2: its forward pass converts {name} to {dtype}; set shard.param_dtype={dtype}, or use "
                f"shard=fsdp1."
            )
    scalars = [name for name, param in model.named_parameters() if not param.ndim]
    for divided in ("tensor_parallel", "expert_parallel"):
        if scalars and (ranks := getattr(settings, divided)) > 1:
            raise ConfigError(
                f"shard.{divided}={ranks} cannot be used with {type(model).__name__}: the gradient of its scalar "
                f"parameter {scalars[0]} may differ between the ranks that divide it; use shard.{divided}=1."
            )


def local_shapes(shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
    """The rows of each parameter for each shard: divided as by `torch.chunk`, so the last may hold less or nothing.

    Shards that hold the same share one dict: a thousand shards have only a few different ones.
    """
    # A parameter has its whole number of rows in the first shards, then the rest in one, and none in the others.
    changes = {0}  # indices of shards that differ from the one before
    for size in {shape[0] for shape in shapes.values() if shape and shape[0]}:
        num_full = size // padded_shape((size,), num_shards)[0]
        changes |= {num_full, num_full + 1}
    local: list[dict[str, Shape]] = []
    for index in range(num_shards):
        same = index not in changes
        local.append(local[-1] if same else {name: _rows(shape, num_shards, index) for name, shape in shapes.items()})
    return local


def _rows(shape: Shape, num_shards: int, index: int) -> Shape:
    if not shape:  # replicated
        return ()
    per_shard, *_ = padded_shape(shape, num_shards)
    return (len(range(shape[0])[index * per_shard : (index + 1) * per_shard]), *shape[1:])


def all_gather_numel(shapes: Mapping[str, Shape], dtype: str, num_shards: int) -> int:
    """The padded rows of all parameters; scalars are on every rank."""
    return sum(prod(padded_shape(shape, num_shards)) for shape in shapes.values() if shape)


def padded_shape(shape: Shape, num_shards: int) -> Shape:
    """The shape of a parameter's first shard, to which `fully_shard` pads all others; a scalar is not sharded."""
    return (-(-shape[0] // num_shards), *shape[1:]) if shape else ()


def _units_run_in_part(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """FQNs of the units that hold, besides what always runs, modules that may run on some ranks only."""
    may_run = set(skippable_modules(model)) - {unit.fqn for unit in units}
    return [unit.fqn for unit in units if any(is_within(name, may_run) for name in unit.parameters)]


def shard(model: nn.Module, settings: ShardConfig, context: DistributedContext) -> ShardedModel:
    """Apply `fully_shard` to each unit of `model` and to the root."""
    *inner, root = prepare_model(model, settings, context)
    pin_memory = context.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": _mesh(settings, context.mesh),
        "reshard_after_forward": bool(settings.reshard_after_forward),
        "offload_policy": CPUOffloadPolicy(pin_memory) if settings.cpu_offload else OffloadPolicy(),
        "ignored_params": {param for param in model.parameters() if not param.ndim},
    }
    complete_gradients(model)
    run_in_part = _units_run_in_part(model, [*inner, root]) if _REDUCES_UNUSED else []
    experts = _divide(model, settings, context, options)
    # The output head and the root run last in the forward pass and first in the backward pass: freeing them in between
    # would only gather them twice.
    kept = options | {"reshard_after_forward": False}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    uncast = MixedPrecisionPolicy(cast_forward_inputs=False)
    for unit in (unit for unit in inner if unit.fqn not in experts):
        module = model.get_submodule(unit.fqn)
        # Quantized weights have units of their own until torch 2.13 (`Fsdp2Config.quantized_dtype`): nothing is cast.
        policy = uncast if unit.is_quantized else _precision(unit.dtype, settings)
        fully_shard(module, mp_policy=policy, **(kept if module is head else options))
        if type(num_ranks := settings.reshard_after_forward) is int and module is not head:
            reshard_over(module, context.neighbor_mesh(num_ranks))  # one mesh for all units
    fully_shard(model, mp_policy=_precision(root.dtype, settings), **kept)
    for fqn in run_in_part:
        model.get_submodule(fqn).set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]  # added by fully_shard
    _prefetch(_fsdp_modules(model)[1:], settings)  # all but the root

    def materialize(tensor: torch.Tensor) -> torch.Tensor:
        is_offloaded = settings.cpu_offload and tensor.ndim
        device = torch.device("cpu") if is_offloaded else context.device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    replace_tensors(model, materialize, buffers=False)
    # Converts nothing, but lets FSDP2 pad its uneven shards now: in the first forward pass it would replace their
    # memory, and `LocalShard`s from before would keep the old one.
    model.to()
    return Fsdp2Model(model, context, _Scalars(model, getattr(torch, settings.reduce_dtype)))


def _divide(
    model: nn.Module, settings: ShardConfig, context: DistributedContext, options: Mapping[str, Any]
) -> Collection[str]:
    """Divide layers or experts of `model` over neighboring ranks; returns the FQNs of the modules with experts."""
    if settings.tensor_parallel > 1:
        tensor_parallel.apply_tensor_parallel(model, context.mesh["tensor"])
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
    """Set for each of `units`, in the order of modules in the model, which ones to prefetch."""
    backwards = units[::-1]
    for number in range(len(units)):
        if ahead := units[number + 1 : number + 1 + (settings.prefetch_forward or 0)]:
            units[number].set_modules_to_forward_prefetch(list(ahead))
        if ahead := backwards[number + 1 : number + 1 + (settings.prefetch_backward or 0)]:
            backwards[number].set_modules_to_backward_prefetch(list(ahead))
