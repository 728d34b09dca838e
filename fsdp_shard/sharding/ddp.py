"""`shard=ddp`: torch's DistributedDataParallel, every rank with the whole model, to compare the sharded ones with.

It loads, trains and saves as they do, and into the same formats, so that a run may go on under another wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import DTYPES, ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, whole_shares
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding.wrap_policy import Unit

# Settings that say how parameters are divided and gathered, which here they are not.
_MEANINGLESS = (
    "norms_in_float32",
    "replicas",
    "tensor_parallel",
    "expert_parallel",
    "reshard_after_forward",
    "prefetch_forward",
    "prefetch_backward",
    "cpu_offload",
    "min_params",
)


@dataclass
class DdpConfig(ShardConfig):
    """`DistributedDataParallel`: nothing is sharded."""

    param_dtype: str = setting("float32", "The dtype that blocks compute in: that of model.dtype.", choices=DTYPES)
    reduce_dtype: str = setting(
        "float32", "The dtype that gradients are summed over the ranks in: that of model.dtype.", choices=DTYPES
    )
    sync_every_micro_batch: bool = setting(
        False, "Reduce gradients after every micro batch, which here costs time and saves nothing."
    )
    find_unused_parameters: bool = setting(
        False,
        "Look in each step for parameters without a gradient, as a model has that sees pictures and is given text; "
        "without it torch ends such a run in its second step.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        standard = DdpConfig()
        for name in _MEANINGLESS:
            if (value := getattr(self, name)) != getattr(standard, name):
                raise ConfigError(
                    f"{prefix}{name}={str(value).lower()} would do nothing with shard=ddp, where every rank has the "
                    f"whole model all the time; leave it out, or use shard=fsdp2."
                )

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        numbers = (param for param in model.parameters() if param.is_floating_point())
        held = {str(param.dtype).removeprefix("torch.") for param in numbers}
        if held != {self.param_dtype} or held != {self.reduce_dtype}:
            raise ConfigError(
                f"shard=ddp computes and reduces in the dtype that parameters are held in, which is "
                f"{' and '.join(sorted(held))}; give the same for model.dtype, shard.param_dtype (now "
                f"{self.param_dtype}) and shard.reduce_dtype (now {self.reduce_dtype}), or use shard=fsdp2."
            )

    def check_dtypes(self, model: nn.Module) -> None:
        self.check_model(model)

    def num_shards(self, num_ranks: int) -> int:
        return 1

    def shares(self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
        return whole_shares(shapes, num_shards)

    def unsharded_bytes(self, units: Sequence[Unit], num_shards: int, *, accumulates: bool) -> int:
        return 0  # all is whole all the time, and counted as such

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        from torch.nn.parallel import DistributedDataParallel

        from fsdp_shard.sharding.activation_checkpointing import recompute_blocks
        from fsdp_shard.sharding.compile import compile_blocks
        from fsdp_shard.sharding.materialize import empty_parameters, materialize_buffers

        self.check_model(model)
        compile_blocks(recompute_blocks(model, self), self.compile)
        materialize_buffers(model, context.device)
        model.apply(empty_parameters(context.device)).to(context.device)
        # Every rank reads the same weights, so nothing is sent at the start.
        wrapped = DistributedDataParallel(
            model,
            init_sync=False,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
        )
        return DdpModel(wrapped, context)


class DdpModel:
    """A model under DistributedDataParallel."""

    divided_over = "replicate"  # of which there is one: every rank has all of it

    def __init__(self, module: DistributedDataParallel, context: DistributedContext) -> None:
        self.module: nn.Module = module
        self._ddp = module
        self._context = context

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        import torch

        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def local_shards(self) -> dict[str, LocalShard]:
        from fsdp_shard.sharding.activation_checkpointing import clean_fqn
        from fsdp_shard.sharding.materialize import buffer_shards

        params = {}
        for number, (name, param) in enumerate(self._ddp.module.named_parameters()):
            writes = number % self._context.world_size == self._context.rank  # they share the work of saving
            params[clean_fqn(name)] = LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), writes)
        return params | buffer_shards(self._ddp.module, self._context)
