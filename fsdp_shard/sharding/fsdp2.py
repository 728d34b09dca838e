"""`shard=fsdp2`: torch's `fully_shard`, parameters as DTensors with their rows divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.base import ShardConfig, ShardedModel
from fsdp_shard.shards import LocalShard, row_major_range

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_shard.distributed import DistributedContext


@dataclass
class Fsdp2Config(ShardConfig):
    """`fully_shard` on each unit and on the root."""

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        import torch
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from fsdp_shard.sharding.activations import checkpoint_blocks
        from fsdp_shard.sharding.buffers import materialise_buffers
        from fsdp_shard.sharding.units import plan_units

        units = [model.get_submodule(fqn) for fqn in plan_units(model, self.blocks)]
        if self.activation_checkpointing:
            checkpoint_blocks(model, self.blocks)
        on_gpu = context.device.type == "cuda"
        settings: dict[str, Any] = {
            "mesh": context.mesh if self.replicas > 1 else context.mesh["shard"],
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.param_dtype), reduce_dtype=getattr(torch, self.reduce_dtype)
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
        }
        _refuse_scalars(model)
        materialise_buffers(model, context.device)
        for unit in units:
            fully_shard(unit, **settings)
        # The root's parameters are used last in the forward pass and first in the backward pass: freeing them between
        # would only gather them twice.
        fully_shard(model, **(settings | {"reshard_after_forward": False}))
        _materialise(model, torch.device("cpu") if self.cpu_offload else context.device)
        assert isinstance(model, FSDPModule)
        return Fsdp2Model(model, context)


class Fsdp2Model:
    """A model under `fully_shard`."""

    def __init__(self, module: nn.Module, context: DistributedContext) -> None:
        self.module = module
        self._context = context

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]  # added by fully_shard
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)  # type: ignore[operator]  # added by fully_shard

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        import torch
        from torch.distributed.tensor import DTensor

        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local_shards(self) -> dict[str, LocalShard]:
        from fsdp_shard.sharding.activations import clean_fqn
        from fsdp_shard.sharding.buffers import buffer_shards

        self._reshard()
        params = {clean_fqn(name): self._shard_of(param) for name, param in self.module.named_parameters()}
        return params | buffer_shards(self.module, self._context)

    def _reshard(self) -> None:
        """Show the sharded parameters, also after a forward pass that no backward pass followed."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shard_of(self, param: nn.Parameter) -> LocalShard:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(param, DTensor)
        shape = tuple(param.shape)
        local, offset = compute_local_shape_and_global_offset(shape, param.device_mesh, param.placements)
        start, _ = row_major_range(shape, range(offset[0], offset[0] + local[0]))
        data = param.to_local().detach().view(-1)
        return LocalShard(param, data, start, shape, writes=self._context.mesh.get_local_rank("replicate") == 0)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every sharded parameter its own rows on `device`, unfilled; tied parameters stay tied, buffers stay put."""
    import torch
    from torch.distributed.tensor import DTensor

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        assert isinstance(tensor, DTensor), "fully_shard left a plain parameter behind"
        return torch.empty_like(tensor, device=device)

    model._apply(empty)


def _refuse_scalars(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.ndim == 0:
            raise ConfigError(
                f"shard=fsdp2 cannot shard the scalar parameter {name}, which torch refuses; use shard=fsdp1."
            )
