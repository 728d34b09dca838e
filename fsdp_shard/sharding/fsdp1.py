"""`shard=fsdp1`: torch's FullyShardedDataParallel wrapper, each unit flattened and divided evenly over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, Unit, flat_shapes, itemsize

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    from fsdp_shard.distributed import DistributedContext


@dataclass
class Fsdp1Config(ShardConfig):
    """`FullyShardedDataParallel` with an auto-wrap policy made of the units.

    For comparison: torch calls it deprecated, and of a unit that is frozen in part it keeps gradients of the whole.
    """

    flattens_units: ClassVar[bool] = True
    accumulates_offloaded: ClassVar[bool] = False
    quantized_dtype: ClassVar[str] = "float32"  # a flat parameter must be floating-point, and is cast as a whole

    def check(self, prefix: str) -> None:
        super().check(prefix)
        for name, what in (("tensor_parallel", "layers"), ("expert_parallel", "experts")):
            if (ranks := getattr(self, name)) > 1:
                raise ConfigError(f"{prefix}{name}={ranks}: shard=fsdp1 cannot divide {what}; use shard=fsdp2.")
        if type(self.reshard_after_forward) is int:
            raise ConfigError(
                f"{prefix}reshard_after_forward={self.reshard_after_forward}: shard=fsdp1 reshards over all ranks "
                f"(true) or not at all (false); use shard=fsdp2 for a number of ranks."
            )
        for name in ("prefetch_forward", "prefetch_backward"):
            if (getattr(self, name) or 0) > 1:
                raise ConfigError(
                    f"{prefix}{name}={getattr(self, name)}: shard=fsdp1 gathers at most one unit ahead; give 0 or 1, "
                    f"or use shard=fsdp2."
                )
        if not self.sync_every_micro_batch and self.param_dtype != self.reduce_dtype:
            raise ConfigError(
                f"{prefix}sync_every_micro_batch=false with shard=fsdp1 would add up gradients in {self.param_dtype}, "
                f"not in {prefix}reduce_dtype={self.reduce_dtype}; use shard=fsdp2, or the same dtype for both."
            )

    def local_shapes(
        self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int
    ) -> list[dict[str, Shape]]:
        names = [unit.parameters for unit in units]
        return flat_shapes(shapes, names, num_shards, [itemsize(unit.dtype) for unit in units])

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import CustomPolicy

        from fsdp_shard.sharding.materialize import empty_parameters
        from fsdp_shard.sharding.prepare_model import prepare_model
        from fsdp_shard.utils import restore_frozen_parameters

        *inner, root = prepare_model(model, self, context)
        if self.compile:
            # The tracer looks at the gradient of each parameter; these are views of a flat one, which have none.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        settings = {model.get_submodule(unit.fqn): {"mixed_precision": self._precision(unit)} for unit in inner}
        for unit in inner:
            if unit.dtype != self.param_dtype and not unit.is_bytes:
                _cast_output(model.get_submodule(unit.fqn), self.param_dtype)
        with _without_warnings():
            wrapped = FullyShardedDataParallel(
                model,
                device_mesh=context.mesh if self.replicas > 1 else context.mesh["shard"],
                sharding_strategy=self._strategy(context),
                auto_wrap_policy=CustomPolicy(lambda module: settings.get(module, False)),
                mixed_precision=self._precision(root),
                cpu_offload=CPUOffload(offload_params=True) if self.cpu_offload else None,
                backward_prefetch=None if self.prefetch_backward == 0 else BackwardPrefetch.BACKWARD_PRE,
                forward_prefetch=self.prefetch_forward == 1,
                device_id=context.device,
                param_init_fn=empty_parameters(context.device),
                use_orig_params=True,
            )
        wrapped.register_forward_pre_hook(lambda module, args: restore_frozen_parameters(wrapped))
        return Fsdp1Model(wrapped, context)

    def _precision(self, unit: Unit) -> MixedPrecision | None:
        import torch
        from torch.distributed.fsdp import MixedPrecision

        from fsdp_shard.utils import keep_batch_norms_wrapped

        if unit.is_bytes:
            return None
        precision = MixedPrecision(
            param_dtype=getattr(torch, unit.dtype),
            reduce_dtype=getattr(torch, self.reduce_dtype),
            # Inputs come in the dtype of what is around; a unit with one of its own casts them.
            cast_forward_inputs=unit.dtype != self.param_dtype,
        )
        if unit.dtype == "float32":
            keep_batch_norms_wrapped(precision)
        return precision

    def _strategy(self, context: DistributedContext) -> ShardingStrategy:
        from torch.distributed.fsdp import ShardingStrategy

        from fsdp_shard.utils import hybrid_shard_grad_op

        if context.world_size == self.replicas:
            return ShardingStrategy.NO_SHARD
        if self.replicas > 1:
            return ShardingStrategy.HYBRID_SHARD if self.reshard_after_forward else hybrid_shard_grad_op()
        return ShardingStrategy.FULL_SHARD if self.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


class Fsdp1Model:
    """A model under FullyShardedDataParallel."""

    shard_mesh_dim = "shard"

    def __init__(self, module: FullyShardedDataParallel, context: DistributedContext) -> None:
        self.module: nn.Module = module
        self._fsdp = module
        self._context = context

    def no_sync(self) -> AbstractContextManager[None]:
        return self._fsdp.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return self._fsdp.clip_grad_norm_(max_norm)  # the free function would take a rank's norm for the whole one

    def local_shards(self) -> dict[str, LocalShard]:
        from fsdp_shard.sharding.activation_checkpointing import clean_fqn
        from fsdp_shard.sharding.materialize import buffer_shards
        from fsdp_shard.utils import flat_parameter_shards, restore_frozen_parameters

        writes = self._context.mesh.get_local_rank("replicate") == 0
        restore_frozen_parameters(self._fsdp)
        names = {id(param): clean_fqn(name) for name, param in self._fsdp.named_parameters()}
        params = {
            names[id(param)]: LocalShard(param, data, start, shape, writes)
            for param, data, start, shape in flat_parameter_shards(self._fsdp)
            if id(param) in names
        }
        return {name: params[name] for name in names.values()} | buffer_shards(self._fsdp, self._context)


def _cast_output(module: nn.Module, dtype: str) -> None:
    """Cast the output of `module` to `dtype`, which FullyShardedDataParallel does not do."""
    import torch

    module.register_forward_hook(lambda module, args, output: output.to(getattr(torch, dtype)))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch says that this wrapper is deprecated, and that frozen parameters in a unit take as much gradient memory as
    trainable ones; whoever chose shard=fsdp1 knows both from our docs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.fsdp")
        warnings.filterwarnings("ignore", r"[\s\S]*has both parameters with requires_grad=True and False", UserWarning)
        yield
