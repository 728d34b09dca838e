"""`shard=ddp`: torch's DistributedDataParallel, with all parameters on every rank, as a baseline for sharding.

It loads, trains and saves like the others, in the same formats, so that a run may resume under another wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import DTYPES, ShardConfig, ShardedModel
from fsdp_shard.sharding.shard_sizes import Shape, Unit
from fsdp_shard.utils import changed_settings, in_yaml, setting

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from fsdp_shard.distributed import DistributedContext

# Settings of how parameters are sharded and gathered, which DDP does not do.
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

    is_sharded: ClassVar[bool] = False

    param_dtype: str = setting("float32", "The dtype that blocks compute in: that of model.dtype.", choices=DTYPES)
    reduce_dtype: str = setting(
        "float32", "The dtype that gradients are reduced in: that of model.dtype.", choices=DTYPES
    )
    sync_every_micro_batch: bool = setting(
        False, "Reduce gradients after every micro-batch, which costs time and saves no memory with DDP."
    )
    find_unused_parameters: bool = setting(
        False,
        "Look for parameters without a gradient in each step, such as the image encoder of a multimodal model that is "
        "trained on text; without it torch fails in the second step.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        for name, value in changed_settings(self, _MEANINGLESS).items():
            raise ConfigError(
                f"{prefix}{name}={in_yaml(value)} would do nothing with shard=ddp, where every rank has the "
                f"whole model all the time; leave it out, or use shard=fsdp2."
            )

    def check_supported(self, model: nn.Module) -> None:
        numbers = (param for param in model.parameters() if param.is_floating_point())
        held = {str(param.dtype).removeprefix("torch.") for param in numbers}
        if held != {self.param_dtype} or held != {self.reduce_dtype}:
            raise ConfigError(
                f"shard=ddp computes and reduces in the dtype of the parameters, which is "
                f"{' and '.join(sorted(held))}; set the same for model.dtype, shard.param_dtype (now "
                f"{self.param_dtype}) and shard.reduce_dtype (now {self.reduce_dtype}), or use shard=fsdp2."
            )

    def local_shapes(
        self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int
    ) -> list[dict[str, Shape]]:
        return [dict(shapes) for _ in range(num_shards)]

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        from torch.nn.parallel import DistributedDataParallel

        from fsdp_shard.sharding.materialize import empty_parameters
        from fsdp_shard.sharding.prepare_model import prepare_model

        prepare_model(model, self, context)
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

    shard_mesh_dim = "replicate"  # its size is one: every rank has all parameters

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
            writes = number % self._context.world_size == self._context.rank  # the ranks divide the work of saving
            params[clean_fqn(name)] = LocalShard(param, param.detach().view(-1), 0, tuple(param.shape), writes)
        return params | buffer_shards(self._ddp.module, self._context)
