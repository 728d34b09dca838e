"""`shard=fsdp2`: torch's `fully_shard`, parameters as DTensors with their rows divided over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, row_shares

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding.wrap_policy import Unit


@dataclass
class Fsdp2Config(ShardConfig):
    """`fully_shard` on each unit and on the root."""

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.prefetch_backward == 0:
            raise ConfigError(
                f"{prefix}prefetch_backward=0: shard=fsdp2 gathers at least one unit ahead in the backward pass; give "
                f"a number from 1 on, or use shard=fsdp1."
            )

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if self.tensor_parallel > 1:
            from fsdp_shard.sharding.tensor_parallel import check_plan

            check_plan(model, self.tensor_parallel)
        if self.expert_parallel > 1:
            from fsdp_shard.sharding.expert_parallel import check_experts

            check_experts(model, self.expert_parallel)
        for name, param in model.named_parameters():
            if param.ndim == 0:
                raise ConfigError(
                    f"shard=fsdp2 cannot shard the scalar parameter {name}, which torch refuses; use shard=fsdp1."
                )

    def shares(self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
        return row_shares(shapes, num_shards)

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        from fsdp_shard.sharding.activation_checkpointing import recompute_blocks
        from fsdp_shard.sharding.compile import compile_blocks
        from fsdp_shard.sharding.materialize import materialize_buffers
        from fsdp_shard.sharding.wrap_policy import plan_units

        self.check_model(model)
        units = plan_units(model, self)
        if self.tensor_parallel > 1:
            from fsdp_shard.sharding.tensor_parallel import divide_layers

            divide_layers(model, context.mesh["tensor"])
            # Logits of divided heads are a view of what was gathered; nothing here changes them in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        experts: Mapping[str, nn.Module] = {}
        if self.expert_parallel > 1:
            assert context.num_expert_ranks == self.expert_parallel
            from fsdp_shard.sharding.expert_parallel import divide_experts

            experts = divide_experts(model, context)
        blocks = recompute_blocks(model, self)
        compile_blocks(blocks, self.compile)
        settings: dict[str, Any] = {
            "mesh": self._mesh(context.mesh),
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": OffloadPolicy(),
        }
        if self.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
        materialize_buffers(model, context.device)
        *inner, root = units
        self._shard_experts(experts, context, settings)
        for unit in (unit for unit in inner if unit.fqn not in experts):
            fully_shard(model.get_submodule(unit.fqn), mp_policy=self._precision(unit), **settings)
        # The root's parameters are used last in the forward pass and first in the backward pass: freeing them between
        # would only gather them twice.
        fully_shard(model, mp_policy=self._precision(root), **(settings | {"reshard_after_forward": False}))
        self._prefetch([module for module in model.modules() if isinstance(module, FSDPModule) and module is not model])
        _materialize(model, torch.device("cpu") if self.cpu_offload else context.device)
        assert isinstance(model, FSDPModule)
        return Fsdp2Model(model, context)

    def _shard_experts(
        self, experts: Mapping[str, nn.Module], context: DistributedContext, settings: Mapping[str, Any]
    ) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        from fsdp_shard.sharding.expert_parallel import average_over

        # What comes in has the dtype that the block around it chose: routing weights may be wider.
        dtypes = {name: getattr(torch, getattr(self, name)) for name in ("param_dtype", "reduce_dtype")}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        for module in experts.values():
            assert context.expert_mesh is not None
            mesh = self._mesh(context.expert_mesh)
            fully_shard(module, **{**settings, "mesh": mesh, "mp_policy": policy})
            assert isinstance(module, FSDPModule)
            average_over(module, context.num_data_ranks, context.expert_mesh.size(1))

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The dimensions of `mesh` that parameters are gathered and gradients reduced over."""
        return mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]

    def _precision(self, unit: Unit) -> MixedPrecisionPolicy:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # What computes in another dtype than those around it gives back theirs.
        output = None if unit.dtype == self.param_dtype else getattr(torch, self.param_dtype)
        return MixedPrecisionPolicy(
            param_dtype=getattr(torch, unit.dtype), reduce_dtype=getattr(torch, self.reduce_dtype), output_dtype=output
        )

    def _prefetch(self, units: list[FSDPModule]) -> None:
        """Tell each of `units`, in the order in which they run, which to gather ahead."""
        backwards = units[::-1]
        for number in range(len(units)):
            if ahead := units[number + 1 : number + 1 + (self.prefetch_forward or 0)]:
                units[number].set_modules_to_forward_prefetch(ahead)
            if ahead := backwards[number + 1 : number + 1 + (self.prefetch_backward or 0)]:
                backwards[number].set_modules_to_backward_prefetch(ahead)


class Fsdp2Model:
    """A model under `fully_shard`."""

    divided_over = "shard"

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

        if self._context.divides_modules:
            from fsdp_shard.sharding.tensor_parallel import clip_grads

            return clip_grads(self.module.parameters(), max_norm)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local_shards(self) -> dict[str, LocalShard]:
        from torch.distributed.tensor import DTensor

        from fsdp_shard.sharding.activation_checkpointing import clean_fqn
        from fsdp_shard.sharding.materialize import buffer_shards
        from fsdp_shard.sharding.tensor_parallel import is_divided, local_box, part_of

        self._reshard()
        mesh = self._context.mesh
        is_first_replica = mesh.get_local_rank("replicate") == 0
        is_first_divided = mesh.ndim <= 2 or mesh.get_local_rank("tensor") == 0
        box = cache(local_box)  # blocks have the same parameters, and it takes torch longer than all the rest
        params = {}
        for name, param in self.module.named_parameters():
            assert isinstance(param, DTensor)
            writes = is_first_replica and (is_first_divided or is_divided(param))
            params[clean_fqn(name)] = part_of(param, writes=writes, box=box)
        return params | buffer_shards(self.module, self._context)

    def _reshard(self) -> None:
        """Show the sharded parameters, also after a forward pass that no backward pass followed."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give every sharded parameter its own rows on `device`, unfilled; tied parameters stay tied, buffers stay put."""
    import torch
    from torch.distributed.tensor import DTensor

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        assert isinstance(tensor, DTensor), "fully_shard left a plain parameter behind"
        return torch.empty_like(tensor, device=device)

    model._apply(empty)
