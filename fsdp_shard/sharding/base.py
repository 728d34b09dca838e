"""What every wrapper takes and gives: the shard settings, and a sharded model as training sees it.

A wrapper is one file with a config dataclass whose `shard(model, context, explain)` returns a `ShardedModel`; the
rest of the package calls only what is written here. Imports no torch, so that a config can be checked without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fsdp_shard.errors import ConfigError
from fsdp_shard.settings import setting
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_shard.distributed import DistributedContext

# float16 needs loss scaling, which bfloat16 made unnecessary.
_DTYPES = ("float32", "bfloat16")


@dataclass
class ShardConfig:
    """Settings that all wrappers share."""

    param_dtype: str = setting(
        "bfloat16", "The dtype that blocks compute in; gathered parameters have it.", choices=_DTYPES
    )
    reduce_dtype: str = setting("float32", "The dtype that gradients are summed over the ranks in.", choices=_DTYPES)
    replicas: int = setting(
        1, "Groups of ranks that hold a copy of the model each, sharded inside a group (HSDP).", minimum=1
    )
    reshard_after_forward: bool = setting(
        True, "Free a block's gathered parameters after its forward pass and gather them again for the backward pass."
    )
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimizer state in CPU memory. GPU only.")
    activation_checkpointing: bool = setting(
        False, "Recompute each block in the backward pass instead of keeping its activations."
    )
    sync_every_micro_batch: bool = setting(
        True,
        "Reduce gradients after every micro batch, which keeps only this rank's part of them. "
        "If false, whole gradients are kept and reduced once a step: more memory, less communication.",
    )
    blocks: list[str] = field(
        default_factory=list,
        metadata={"help": "Class names of the blocks to shard along; empty: the model's own no-split blocks."},
    )

    def check_ranks(self, num_ranks: int, on_gpu: bool) -> None:
        """Raise ConfigError when these settings cannot work, or would do nothing, on `num_ranks` ranks."""
        if num_ranks % self.replicas:
            raise ConfigError(f"shard.replicas={self.replicas} does not divide the {num_ranks} ranks of this run.")
        if self.cpu_offload and not on_gpu:
            raise ConfigError("shard.cpu_offload=true needs a GPU to offload from; this run is on the CPU already.")

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        """Wrap `model` (on meta, buffers on the device) over the ranks of `context`; parameters are left unfilled."""
        raise AssertionError("a wrapper's config class implements this")


class ShardedModel(Protocol):
    """A model whose parameters are divided over ranks."""

    module: nn.Module

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of the backward passes inside on this rank, unreduced."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; the norm before, a scalar []."""
        ...

    def local_shards(self) -> dict[str, LocalShard]:
        """This rank's part of every parameter and persistent buffer, by the FQN that the unsharded model has."""
        ...
