"""`shard=fsdp1`: torch's FullyShardedDataParallel wrapper, each unit flattened and divided evenly over the ranks.

torch gives no public way to a rank's own part of a parameter short of a sharded state dict, which gathers every unit
whole first. The flat parameter records where each original parameter lies in it, so the part is read off there. Those
names are private to torch; they have been the same since 2.0, and `test_local_shards` fails when they change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, flat_shares, itemsize

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding.wrap_policy import Unit


@dataclass
class Fsdp1Config(ShardConfig):
    """`FullyShardedDataParallel` with an auto-wrap policy made of the units.

    For comparison: torch calls it deprecated, and of a unit that is frozen in part it keeps gradients of the whole.
    """

    joins_frozen: ClassVar[bool] = True
    held_bytes: ClassVar[str] = "float32"  # what is flattened must be numbers, and is cast with the rest of its unit

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

    def check_accumulation(self, num_micro_batches: int) -> None:
        if self.cpu_offload and self.sync_every_micro_batch and num_micro_batches > 1:
            raise ConfigError(
                f"shard=fsdp1 with shard.cpu_offload=true keeps the gradients of the last of {num_micro_batches} "
                f"micro-batches only, a limit of torch's; use shard=fsdp2, a larger train.micro_batch_size, or "
                f"shard.sync_every_micro_batch=false with the same dtype for shard.param_dtype and shard.reduce_dtype."
            )

    def shares(self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
        names = [unit.parameters for unit in units]
        return flat_shares(shapes, names, num_shards, [itemsize(unit.dtype) for unit in units])

    @property
    def accumulate_dtype(self) -> str:
        return self.param_dtype

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import CustomPolicy

        from fsdp_shard.sharding.activation_checkpointing import recompute_blocks
        from fsdp_shard.sharding.compile import compile_blocks
        from fsdp_shard.sharding.materialize import empty_parameters, materialize_buffers
        from fsdp_shard.sharding.wrap_policy import plan_units

        self.check_model(model)
        *inner, root = plan_units(model, self)
        blocks = recompute_blocks(model, self)
        compile_blocks(blocks, self.compile)
        if self.compile:
            # The tracer looks whether each parameter has a gradient; here they are views of a flat one, which have not.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        settings = {model.get_submodule(unit.fqn): {"mixed_precision": self._precision(unit)} for unit in inner}
        for unit in inner:
            if unit.dtype != self.param_dtype and not unit.is_bytes:
                _cast_output(model.get_submodule(unit.fqn), self.param_dtype)
        materialize_buffers(model, context.device)
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
        wrapped.register_forward_pre_hook(_show_frozen)
        return Fsdp1Model(wrapped, context)

    def _precision(self, unit: Unit) -> MixedPrecision | None:
        import torch
        from torch.distributed.fsdp import MixedPrecision

        if unit.is_bytes:
            return None
        precision = MixedPrecision(
            param_dtype=getattr(torch, unit.dtype),
            reduce_dtype=getattr(torch, self.reduce_dtype),
            # Inputs come in the dtype of what is around; a unit with one of its own casts them.
            cast_forward_inputs=unit.dtype != self.param_dtype,
        )
        if unit.dtype == "float32":
            # torch takes batch norms out of a unit to spare them a lower precision; without one, blocks stay whole.
            precision._module_classes_to_ignore = ()
        return precision

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

    divided_over = "shard"

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

        writes = self._context.mesh.get_local_rank("replicate") == 0
        _show_frozen(self._fsdp)
        ranges = {id(param): place for param, place in _flat_ranges(self._fsdp)}
        params = {}
        for name, param in self._fsdp.named_parameters():
            data, start, shape = ranges[id(param)]
            params[clean_fqn(name)] = LocalShard(param, data, start, shape, writes)
        return params | buffer_shards(self._fsdp, self._context)


def _show_frozen(module: FullyShardedDataParallel, *_: Any) -> None:
    """Put frozen parameters back in their places, from where torch leaves them in a backward pass on one rank.

    It takes what is not divided for put back already. If any of them are tied, the next forward pass then ends with an
    assertion of torch's.
    """
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is None or handle.uses_sharded_strategy or handle.flat_param.requires_grad:
            continue
        first: Any = handle.flat_param._param_infos[0]
        if not isinstance(getattr(first.module, first.param_name), nn.Parameter):
            handle._use_unsharded_views(as_params=True)


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


def _cast_output(module: nn.Module, dtype: str) -> None:
    """Have `module` give back tensors of `dtype`, which FullyShardedDataParallel leaves to its user."""
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
