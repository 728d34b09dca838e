"""The settings of all wrappers by name, and the function that shards a model from Python.

To add a wrapper, add a settings class here and a module of the same name (see `config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import DTYPES, ShardConfig, ShardedModel
from fsdp_shard.sharding.rank_counts import check_ranks
from fsdp_shard.utils import check, nearest, refuse_changed, setting

if TYPE_CHECKING:
    from torch import nn

    from fsdp_shard.distributed import DistributedContext


@dataclass
class Fsdp2Config(ShardConfig):
    """`fully_shard` on each unit and on the root."""

    wrapper: ClassVar[str] = "fsdp2"
    # Before torch 2.13, `fully_shard` briefly made each parameter require gradients, which bytes cannot.
    quantized_dtype: ClassVar[str] = "uint8" if Version(version("torch")) >= Version("2.13") else "float32"

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.prefetch_backward == 0:
            raise ConfigError(
                f"{prefix}prefetch_backward=0: shard=fsdp2 gathers at least one unit ahead in the backward pass; give "
                f"a number from 1 on, or use shard=fsdp1."
            )


@dataclass
class Fsdp1Config(ShardConfig):
    """`FullyShardedDataParallel` with an auto-wrap policy for the units.

    For comparison: torch has deprecated it, and for a partly frozen unit it keeps gradients of the whole unit.
    """

    wrapper: ClassVar[str] = "fsdp1"
    flattens_units: ClassVar[bool] = True
    accumulates_offloaded_gradients: ClassVar[bool] = False
    quantized_dtype: ClassVar[str] = "float32"  # flat parameters must be floating-point, and are cast as a whole

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


# Settings for sharding and gathering parameters, which do not apply to DDP.
_NOT_FOR_DDP = (
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


# Settings for output, the time of gradient reduction, and a rank's part of each sequence.
_ONLY_FOR_FINETUNE = ("explain", "sync_every_micro_batch", "context_parallel", "context_method")


@dataclass
class DdpConfig(ShardConfig):
    """`DistributedDataParallel`: nothing is sharded."""

    wrapper: ClassVar[str] = "ddp"
    is_sharded: ClassVar[bool] = False

    param_dtype: str = setting("float32", "The dtype in which blocks compute: that of model.dtype.", choices=DTYPES)
    reduce_dtype: str = setting(
        "float32", "The dtype in which gradients are reduced: that of model.dtype.", choices=DTYPES
    )
    sync_every_micro_batch: bool = setting(
        False, "Reduce gradients after every micro-batch, which costs time and saves no memory with DDP."
    )
    find_unused_parameters: bool = setting(
        False,
        "Look for parameters without a gradient in each step, such as the image encoder of a multimodal model trained "
        "on text; without it, torch fails in the second step.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        why = "has no effect with shard=ddp, where every rank has the whole model all the time; remove it, or use"
        refuse_changed(self, _NOT_FOR_DDP, prefix, f"{why} shard=fsdp2.")


WRAPPERS: dict[str, type[ShardConfig]] = {kind.wrapper: kind for kind in (Fsdp2Config, Fsdp1Config, DdpConfig)}


def shard(model: nn.Module, context: DistributedContext, wrapper: str = "fsdp2", **settings: Any) -> ShardedModel:
    """Shard `model` along its no-split blocks over the ranks of `context`.

    Existing weights are kept; those of a model on the meta device are left unfilled.

    Args:
        model: The model, on the device of `context` or on meta, under no wrapper. For a transformers model on meta, the
            buffers that checkpoints do not store (rotary frequencies) are computed. In other models, a module must not
            read another one's weights without calling it, unless `min_params` keeps both in one unit.
        context: The ranks, from `init_distributed`.
        wrapper: `fsdp2`, `fsdp1` or `ddp`.
        settings: `shard.*` settings. `param_dtype`, the dtype of the computation, is bfloat16 unless it is set, and
            float32 under ddp. Floating-point inputs are cast to it, but neither buffers nor tensors that the forward
            pass makes: where torch finds float32 with bfloat16, cast in the model, or set `param_dtype="float32"`.
            With `activation_checkpointing`, the model has to be called with `use_cache=False`: a recomputed block would
            fill a cache a second time, and torch may raise a RuntimeError.

    Returns:
        The sharded model.

    Raises:
        ConfigError: The wrapper or a setting does not exist, or does not work with this model and these ranks; the
            model is already wrapped, or the process group of `context` has ended.
        ModelError: No blocks are found in the model.

    Example:
        >>> with fsdp_shard.init_distributed() as context:  # doctest: +SKIP
        ...     sharded = fsdp_shard.shard(model, context, "fsdp2", param_dtype="float32")
    """
    if not isinstance(wrapper, str) or wrapper not in WRAPPERS:
        raise ConfigError(
            f"shard={wrapper} is not one of {', '.join(WRAPPERS)}{nearest(str(wrapper), list(WRAPPERS))}."
        )
    known = list(WRAPPERS[wrapper].__dataclass_fields__)
    for name in settings:
        if name not in known:
            raise ConfigError(f"shard.{name} is not a setting of {wrapper}{nearest(name, known)}.")
    _check_context(context)
    config = WRAPPERS[wrapper](**settings)
    check(config)
    refuse_changed(config, _ONLY_FOR_FINETUNE, "shard.", "is for finetune, and has no effect here; remove it.")
    check_ranks(config, context.world_size, on_gpu=context.device.type == "cuda")
    _check_mesh_of(context, config)
    from fsdp_shard.sharding.module_shards import free_after_passes_without_gradients
    from fsdp_shard.sharding.prepare_model import check_dtypes, complete_buffers, refuse_wrapped, warn_of_batch_norms

    refuse_wrapped(model)
    warn_of_batch_norms(model, context)
    config.check_supported(model)
    check_dtypes(model, config)
    complete_buffers(model, context)
    sharded = config.shard(model, context)
    free_after_passes_without_gradients(sharded.module)
    return sharded


def _check_context(context: DistributedContext) -> None:
    """Raise ConfigError unless `context` has a process group, and one for loops of one's own."""
    import torch.distributed as dist

    from fsdp_shard.distributed import DistributedContext as Context

    if not isinstance(context, Context):
        raise ConfigError(
            f"context is {type(context).__name__}, not the ranks that `with fsdp_shard.init_distributed() as context` "
            f"yields; pass these."
        )
    if not dist.is_initialized():
        raise ConfigError(
            "The process group of context has ended; shard and train the model within the block of `with "
            "fsdp_shard.init_distributed() as context`."
        )
    if context.num_context_ranks > 1:
        raise ConfigError(
            f"The process group was initialized with context_parallel={context.num_context_ranks}, which is for the "
            f"loop of finetune; in a recipe use config.shard.shard(model, context), elsewhere remove it."
        )


def _check_mesh_of(context: DistributedContext, config: ShardConfig) -> None:
    """Raise ConfigError unless the settings divide the ranks as `context` does."""
    joined = {
        "replicas": context.num_replicas if config.is_sharded else 1,
        "tensor_parallel": context.num_tensor_ranks,
        "expert_parallel": context.num_expert_ranks,
    }
    for name, ranks in joined.items():
        if (given := getattr(config, name)) != ranks:
            raise ConfigError(
                f"{name}={given}, but the process group was initialized with {name}={ranks}; pass the same to both."
            )
