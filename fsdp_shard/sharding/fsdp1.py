"""`shard=fsdp1`: torch's FullyShardedDataParallel wrapper; each unit is flattened and divided evenly over the ranks."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_shard import utils
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import Block, no_split_blocks
from fsdp_shard.sharding.config import Shape, ShardConfig, ShardedModel, Unit, itemsize
from fsdp_shard.sharding.forward_trace import trace_forward
from fsdp_shard.sharding.module_shards import free_gathered, shards_of
from fsdp_shard.sharding.prepare_model import empty_parameters, prepare_model
from fsdp_shard.sharding.routed_lists import routed_lists
from fsdp_shard.sharding.wrap_policy import is_param_wrapper

_FLAT_ALIGN_BYTES = 16  # torch.distributed.fsdp._flat_param: each parameter of a unit begins at a multiple of this


@dataclass(frozen=True)
class Fsdp1Model:
    """A model under FullyShardedDataParallel."""

    module: fsdp.FullyShardedDataParallel
    context: DistributedContext
    shard_mesh_dim = "shard"

    def no_sync(self) -> AbstractContextManager[None]:
        # On one rank nothing is reduced, and torch 2.13 raises a RuntimeError for tied weights. Offloaded gradients,
        # however, are only added up without a reduction.
        if self.context.world_size == 1 and not self.module.cpu_offload.offload_params:
            return nullcontext()
        return self.module.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        free_gathered(self.module)  # after a pass without a backward pass, the next one would use old values
        return self.module.clip_grad_norm_(max_norm)  # the free function would use only this rank's norm

    def local_shards(self) -> dict[str, LocalShard]:
        return shards_of(self.module, self.context).shards


def check_supported(model: nn.Module, settings: ShardConfig) -> None:
    """Raise ConfigError for a model that FullyShardedDataParallel rejects, fails with or trains differently.

    These are scalar parameters, layers that the model's own backward pass recomputes, trained modules that may not
    run in a step, and single parameters that peft adapts.
    """
    for fqn in (name for name, module in model.named_modules() if is_param_wrapper(module)):
        raise ConfigError(  # it changes a view of a flat parameter in place, which autograd refuses
            f"shard=fsdp1 cannot shard {fqn} of {type(model).__name__}, which has peft's LoRA of single "
            f"parameters; use shard=fsdp2, or adapt other modules (adapter.target_modules)."
        )
    trace, blocks = trace_forward(model), list[Block]()
    with suppress(ModelError):  # units by size do not need blocks
        blocks = no_split_blocks(model, settings.blocks)
    for fqn in (block.fqn for block in blocks if block.repeated and block.fqn in trace.called - trace.with_grad):
        raise ConfigError(
            f"shard=fsdp1 cannot shard {type(model).__name__}, whose own backward pass computes {fqn} again when its "
            f"parameters are sharded; use shard=fsdp2."
        )
    for fqn, modules in routed_lists(model):
        if any(param.requires_grad for param in modules.parameters()):
            raise ConfigError(
                f"shard=fsdp1 cannot train {fqn} of {type(model).__name__}, of which only some modules run in a step: "
                f"the others would get gradients of zeros, which momentum and weight decay act on; use shard=fsdp2."
            )
    for name in (name for name, param in model.named_parameters() if not param.ndim):
        raise ConfigError(
            f"shard=fsdp1 cannot shard the scalar parameter {name} of {type(model).__name__}, which torch refuses; use "
            f"shard=fsdp2."
        )


def local_shapes(shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
    """Each parameter's flat shape for each shard; the padding of a unit is `(padding of unit N)`.

    The flattened parameters of a unit are concatenated, and the result is divided evenly.
    """
    shards: list[dict[str, Shape]] = [{} for _ in range(num_shards)]
    for number, unit in enumerate(units):
        spans, end = flat_spans({name: shapes[name] for name in unit.parameters}, unit.dtype)
        length = -(-end // num_shards)
        for index, local in enumerate(shards):
            low, high = index * length, (index + 1) * length
            held = {name: max(0, min(high, end) - max(low, start)) for name, (start, end) in spans.items()}
            local.update({name: (count,) for name, count in held.items()})
            local[f"(padding of unit {number})"] = (length - sum(held.values()),)
    return shards


def all_gather_numel(shapes: Mapping[str, Shape], dtype: str, num_shards: int) -> int:
    """The length of a unit's flattened parameters, divided evenly."""
    return -(-flat_spans(shapes, dtype)[1] // num_shards)


def flat_spans(shapes: Mapping[str, Shape], dtype: str) -> tuple[dict[str, tuple[int, int]], int]:
    """The position of each parameter in the unit's flat parameter, and the length of the flat parameter."""
    multiple, spans, end = max(1, _FLAT_ALIGN_BYTES // itemsize(dtype)), {}, 0
    for name, shape in shapes.items():
        start = -(-end // multiple) * multiple
        end = start + prod(shape)
        spans[name] = start, end
    return spans, end


def shard(model: nn.Module, settings: ShardConfig, context: DistributedContext) -> ShardedModel:
    """Wrap `model` in FullyShardedDataParallel, with an auto-wrap policy for its units."""
    *inner, root = prepare_model(model, settings, context)
    policy = {model.get_submodule(unit.fqn): {"mixed_precision": _precision(unit, settings)} for unit in inner}
    dtype = getattr(torch, settings.param_dtype)
    for unit in inner:
        # torch does not cast the outputs of such a unit
        if unit.dtype != settings.param_dtype and not unit.is_quantized:
            model.get_submodule(unit.fqn).register_forward_hook(lambda module, args, output: output.to(dtype))
    with warnings.catch_warnings():
        # Our docs on shard=fsdp1 already say that this wrapper is deprecated, and that frozen parameters in a unit need
        # as much gradient memory as trainable ones.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.fsdp")
        warnings.filterwarnings("ignore", r"[\s\S]*has both parameters with requires_grad=True and False", UserWarning)
        wrapped = fsdp.FullyShardedDataParallel(
            model,
            device_mesh=context.mesh if settings.replicas > 1 else context.mesh["shard"],
            sharding_strategy=_strategy(settings, context),
            auto_wrap_policy=CustomPolicy(lambda module: policy.get(module, False)),
            mixed_precision=_precision(root, settings),
            cpu_offload=fsdp.CPUOffload(offload_params=True) if settings.cpu_offload else None,
            backward_prefetch=None if settings.prefetch_backward == 0 else fsdp.BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=settings.prefetch_forward == 1,
            device_id=context.device,
            param_init_fn=empty_parameters(context.device),
            use_orig_params=True,
        )
    for part in fsdp.FullyShardedDataParallel.fsdp_modules(wrapped):
        part.training = part.module.training  # or wrappers would say that a model in eval mode trains
    if settings.cpu_offload:
        utils.pin_flat_parameters(wrapped)
    wrapped.register_forward_pre_hook(lambda module, args: utils.restore_frozen_parameters(wrapped))
    return Fsdp1Model(wrapped, context)


def _precision(unit: Unit, settings: ShardConfig) -> fsdp.MixedPrecision | None:
    if unit.is_quantized:
        return None
    precision = fsdp.MixedPrecision(
        param_dtype=getattr(torch, unit.dtype),
        reduce_dtype=getattr(torch, settings.reduce_dtype),
        # Inputs have the dtype of the surrounding unit; a unit with another dtype casts them.
        cast_forward_inputs=unit.dtype != settings.param_dtype,
    )
    if unit.dtype == "float32":
        utils.keep_batch_norms_wrapped(precision)
    return precision


def _strategy(settings: ShardConfig, context: DistributedContext) -> fsdp.ShardingStrategy:
    if context.world_size == settings.replicas:
        return fsdp.ShardingStrategy.NO_SHARD
    if settings.replicas > 1:
        return fsdp.ShardingStrategy.HYBRID_SHARD if settings.reshard_after_forward else utils.hybrid_shard_grad_op()
    return fsdp.ShardingStrategy.FULL_SHARD if settings.reshard_after_forward else fsdp.ShardingStrategy.SHARD_GRAD_OP
