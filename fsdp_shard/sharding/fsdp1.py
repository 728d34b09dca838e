"""`shard=fsdp1`: torch's FullyShardedDataParallel wrapper, each unit flattened and divided evenly over the ranks.

torch gives no public way to a rank's own part of a parameter short of a sharded state dict, which gathers every unit
whole first. The flat parameter records where each original parameter lies in it, so the part is read off there. Those
names are private to torch; they have been the same since 2.0, and `test_local_shards` fails when they change.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.memory import give_back_free_memory
from fsdp_shard.sharding.base import ShardConfig, ShardedModel
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from fsdp_shard.distributed import DistributedContext


_LARGE_BYTES = 1 << 20


@dataclass
class Fsdp1Config(ShardConfig):
    """`FullyShardedDataParallel` with an auto-wrap policy made of the units."""

    def check(self, prefix: str) -> None:
        if not self.sync_every_micro_batch and self.param_dtype != self.reduce_dtype:
            raise ConfigError(
                f"{prefix}sync_every_micro_batch=false with shard=fsdp1 would add up gradients in {self.param_dtype}, "
                f"not in {prefix}reduce_dtype={self.reduce_dtype}; use shard=fsdp2, or the same dtype for both."
            )

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        import torch
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import CustomPolicy

        from fsdp_shard.sharding.activations import checkpoint_blocks
        from fsdp_shard.sharding.buffers import materialise_buffers
        from fsdp_shard.sharding.units import plan_units

        fqns = plan_units(model, self.blocks)
        if self.activation_checkpointing:
            checkpoint_blocks(model, self.blocks)
        units = {model.get_submodule(fqn) for fqn in fqns}
        materialise_buffers(model, context.device)
        with _without_deprecations():
            wrapped = FullyShardedDataParallel(
                model,
                device_mesh=context.mesh if self.replicas > 1 else context.mesh["shard"],
                sharding_strategy=self._strategy(context),
                auto_wrap_policy=CustomPolicy(lambda module: module in units),
                mixed_precision=MixedPrecision(
                    param_dtype=getattr(torch, self.param_dtype), reduce_dtype=getattr(torch, self.reduce_dtype)
                ),
                cpu_offload=CPUOffload(offload_params=True) if self.cpu_offload else None,
                device_id=context.device,
                param_init_fn=_empty_parameters(context.device),
                use_orig_params=True,
            )
        return Fsdp1Model(wrapped, context)

    def _strategy(self, context: DistributedContext) -> ShardingStrategy:
        from torch.distributed.fsdp import ShardingStrategy

        if context.world_size == self.replicas:
            return ShardingStrategy.NO_SHARD
        if self.replicas > 1:
            full, grad_op = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
        else:
            full, grad_op = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        return full if self.reshard_after_forward else grad_op


class Fsdp1Model:
    """A model under FullyShardedDataParallel."""

    def __init__(self, module: FullyShardedDataParallel, context: DistributedContext) -> None:
        self.module: nn.Module = module
        self._fsdp = module
        self._context = context

    def no_sync(self) -> AbstractContextManager[None]:
        return self._fsdp.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return self._fsdp.clip_grad_norm_(max_norm)  # the free function would take a rank's norm for the whole one

    def local_shards(self) -> dict[str, LocalShard]:
        from fsdp_shard.sharding.activations import clean_fqn
        from fsdp_shard.sharding.buffers import buffer_shards

        writes = self._context.mesh.get_local_rank("replicate") == 0
        ranges = {id(param): place for param, place in _flat_ranges(self._fsdp)}
        params = {}
        for name, param in self._fsdp.named_parameters():
            data, start, shape = ranges[id(param)]
            params[clean_fqn(name)] = LocalShard(param, data, start, shape, writes)
        return params | buffer_shards(self._fsdp, self._context)


def _flat_ranges(
    module: FullyShardedDataParallel,
) -> Iterator[tuple[nn.Parameter, tuple[torch.Tensor, int, tuple[int, ...]]]]:
    """(original parameter, (this rank's elements of it, where they start in it, its full shape)) of every unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is None:
            continue
        flat: Any = handle.flat_param
        divided = handle.uses_sharded_strategy
        for param, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            if not divided:
                yield param, (param.detach().view(-1), 0, tuple(shape))
            elif info.in_shard:
                data = flat.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                yield param, (data, info.intra_param_start_idx, tuple(shape))
            else:
                yield param, (flat.detach()[:0], prod(shape), tuple(shape))


def _empty_parameters(device: torch.device) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives one module's own parameters memory, unfilled; tied ones stay tied."""
    import torch

    # The meta parameter is kept, so that ids stay unique; the real one is not, so that a sharded unit is free.
    made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def init(module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            known = made[id(param)][1]() if id(param) in made else None
            if known is None:
                if device.type == "cpu" and param.numel() * param.element_size() >= _LARGE_BYTES:
                    give_back_free_memory()  # what the unit before left when it was sharded
                empty = torch.empty_like(param, device=device)
                known = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
                made[id(param)] = param, weakref.ref(known)
            module._parameters[name] = known

    return init


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """torch says that this wrapper and its NO_SHARD are deprecated; whoever chose shard=fsdp1 knows from our docs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.fsdp")
        yield
