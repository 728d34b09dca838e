"""`shard=fsdp2`: torch's `fully_shard`, parameters as DTensors with their rows divided over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, Unit, row_shapes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from fsdp_shard.distributed import DistributedContext


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

    def check_supported(self, model: nn.Module) -> None:
        if self.tensor_parallel > 1:
            from fsdp_shard.sharding.tensor_parallel import check_tensor_parallel

            check_tensor_parallel(model, self.tensor_parallel)
        if self.expert_parallel > 1:
            from fsdp_shard.sharding.expert_parallel import check_experts

            check_experts(model, self.expert_parallel)
        for name, param in model.named_parameters():
            if param.ndim == 0:
                raise ConfigError(
                    f"shard=fsdp2 cannot shard the scalar parameter {name}, which torch refuses; use shard=fsdp1."
                )

    def local_shapes(
        self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int
    ) -> list[dict[str, Shape]]:
        return row_shapes(shapes, num_shards)

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        from fsdp_shard.sharding.prepare_model import prepare_model
        from fsdp_shard.utils import replace_tensors

        *inner, root = prepare_model(model, self, context)
        settings: dict[str, Any] = {
            "mesh": self._mesh(context.mesh),
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": OffloadPolicy(),
        }
        if self.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
        experts = self._divide(model, context, settings)
        for unit in (unit for unit in inner if unit.fqn not in experts):
            fully_shard(model.get_submodule(unit.fqn), mp_policy=self._precision(unit), **settings)
        # The root's parameters are used last in the forward pass and first in the backward pass: freeing them between
        # would only gather them twice.
        fully_shard(model, mp_policy=self._precision(root), **(settings | {"reshard_after_forward": False}))
        modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._prefetch(modules[1:])  # all but the root
        device = torch.device("cpu") if self.cpu_offload else context.device
        replace_tensors(model, lambda t: torch.empty_like(t, device=device) if t.is_meta else t, buffers=False)
        # Converts nothing, but lets FSDP2 pad its uneven shards now: in the first forward pass it would replace their
        # memory, and `LocalShard`s from before would keep the old one.
        model.to()
        return Fsdp2Model(model, context, modules)

    def _divide(self, model: nn.Module, context: DistributedContext, settings: Mapping[str, Any]) -> Collection[str]:
        """Divide layers or experts of `model` over neighboring ranks; returns the FQNs of the modules with experts."""
        if self.tensor_parallel > 1:
            from fsdp_shard.sharding.tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(model, context.mesh["tensor"])
            # Logits of divided heads are a view of what was gathered; nothing here changes them in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        if self.expert_parallel == 1:
            return ()
        from fsdp_shard.sharding.expert_parallel import divide_experts, shard_experts

        assert context.expert_mesh is not None
        assert context.num_expert_ranks == self.expert_parallel
        experts = divide_experts(model, context)
        # Inputs keep the dtype that the block around them chose: routing weights may be wider.
        policy = replace(self._precision(None), cast_forward_inputs=False)
        shard_experts(experts.values(), context, self._mesh(context.expert_mesh), {**settings, "mp_policy": policy})
        return experts

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The dimensions of `mesh` over which parameters are gathered and gradients are reduced."""
        return mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]

    def _precision(self, unit: Unit | None) -> MixedPrecisionPolicy:
        """The dtypes of `unit`, or those of all units that have none of their own."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        dtype = unit.dtype if unit else self.param_dtype
        # A unit that computes in another dtype than those around it returns theirs.
        output = None if dtype == self.param_dtype else getattr(torch, self.param_dtype)
        return MixedPrecisionPolicy(getattr(torch, dtype), getattr(torch, self.reduce_dtype), output)

    def _prefetch(self, units: list[FSDPModule]) -> None:
        """Set for each of `units`, in the order in which they run, which ones to prefetch."""
        backwards = units[::-1]
        for number in range(len(units)):
            if ahead := units[number + 1 : number + 1 + (self.prefetch_forward or 0)]:
                units[number].set_modules_to_forward_prefetch(ahead)
            if ahead := backwards[number + 1 : number + 1 + (self.prefetch_backward or 0)]:
                backwards[number].set_modules_to_backward_prefetch(ahead)


class Fsdp2Model:
    """A model under `fully_shard`."""

    shard_mesh_dim = "shard"

    def __init__(self, module: nn.Module, context: DistributedContext, fsdp_modules: Sequence[FSDPModule]) -> None:
        self.module = module
        self._context = context
        self._fsdp_modules = fsdp_modules

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
        from fsdp_shard.sharding.tensor_parallel import is_divided, local_shard
        from fsdp_shard.utils import local_shape_and_offset

        for fsdp_module in self._fsdp_modules:
            fsdp_module.reshard()  # gathered parameters are left after a forward pass without a backward pass
        mesh = self._context.mesh
        is_first_replica = mesh.get_local_rank("replicate") == 0
        is_first_divided = mesh.ndim <= 2 or mesh.get_local_rank("tensor") == 0
        box = cache(local_shape_and_offset)  # slow, and blocks have the same parameters
        params = {}
        for name, param in self.module.named_parameters():
            assert isinstance(param, DTensor)
            writes = is_first_replica and (is_first_divided or is_divided(param))
            params[clean_fqn(name)] = local_shard(param, writes=writes, box=box)
        return params | buffer_shards(self.module, self._context)
