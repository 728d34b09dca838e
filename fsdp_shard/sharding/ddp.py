"""`shard=ddp`: torch's DistributedDataParallel, with all parameters on every rank, as a baseline for sharding.

It loads, trains and saves like the other wrappers, in the same formats, so a run may resume under another wrapper.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import Shape, ShardedModel, Unit
from fsdp_shard.sharding.module_shards import shards_of
from fsdp_shard.sharding.prepare_model import empty_parameters, prepare_model
from fsdp_shard.sharding.registry import DdpConfig


@dataclass(frozen=True)
class DdpModel:
    """A model under DistributedDataParallel."""

    module: nn.Module
    context: DistributedContext
    shard_mesh_dim = "replicate"  # its size is one: every rank has all parameters

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def local_shards(self) -> dict[str, LocalShard]:
        return shards_of(self.module, self.context).shards


def check_supported(model: nn.Module, settings: DdpConfig) -> None:
    """Raise ConfigError unless all parameters of `model` have the dtype of computation and reduction."""
    held = {str(param.dtype).removeprefix("torch.") for param in model.parameters() if param.is_floating_point()}
    if held != {settings.param_dtype} or held != {settings.reduce_dtype}:
        raise ConfigError(
            f"shard=ddp computes and reduces in the dtype of the parameters, which is "
            f"{' and '.join(sorted(held))}; set the same for model.dtype, shard.param_dtype (now "
            f"{settings.param_dtype}) and shard.reduce_dtype (now {settings.reduce_dtype}), or use shard=fsdp2."
        )


def local_shapes(shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
    """The unsharded shapes, for each rank."""
    return [dict(shapes) for _ in range(num_shards)]


def all_gather_numel(shapes: Mapping[str, Shape], dtype: str, num_shards: int) -> int:
    """The number of elements of all parameters, which are not divided."""
    return sum(map(prod, shapes.values()))


def shard(model: nn.Module, settings: DdpConfig, context: DistributedContext) -> ShardedModel:
    """Wrap `model` in DistributedDataParallel, with unfilled parameters on this rank's device."""
    prepare_model(model, settings, context)
    has_weights = any(not param.is_meta for param in model.parameters())
    model.apply(empty_parameters(context.device))
    if any(tensor.device != context.device for tensor in (*model.parameters(), *model.buffers())):
        model.to(context.device)
    if not any(param.requires_grad for param in model.parameters()):
        return DdpModel(model, context)  # gradients are not reduced
    # Before torch 2.13, which deprecates it, `broadcast_buffers` was the only name.
    no_buffers: dict[str, Any] = {"forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model,
        init_sync=has_weights,  # of rank 0; otherwise every rank reads the same ones
        **no_buffers,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.find_unused_parameters,
    )
    wrapped.training = model.training  # or the wrapper would say that a model in eval mode trains
    return DdpModel(wrapped, context)
