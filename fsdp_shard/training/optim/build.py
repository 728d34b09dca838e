"""Building the optimizer of a sharded model."""

from typing import cast

from torch import nn, optim

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardedModel, split_groups_by_mesh
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.optim.whole_param_optimizer import FullParamOptimizer


def build_optimizer(config: OptimConfig, model: ShardedModel, context: DistributedContext) -> optim.Optimizer:
    """Build the optimizer of a model's trainable parameters; a collective.

    Weight decay depends on the unsharded shapes.

    Args:
        config: Settings of the optimizer.
        model: The sharded model.
        context: The ranks that the model is sharded over.

    Raises:
        ConfigError: The optimizer needs full parameters, but layers or experts are divided over ranks.

    Example:
        >>> optimizer = fs.build_optimizer(config.optim, loaded.model, start.context)  # doctest: +SKIP
    """
    shards = {name: shard for name, shard in model.local_shards().items() if isinstance(shard.tensor, nn.Parameter)}
    shapes = {name: shard.shape for name, shard in shards.items()}
    if config.needs_full_params and context.divides_modules:
        ranks = max(context.num_tensor_ranks, context.num_expert_ranks)
        divided = "tensor_parallel" if context.num_tensor_ranks > 1 else "expert_parallel"
        raise ConfigError(
            f"This optimizer needs full parameters for an update, which it cannot gather with shard.{divided}={ranks}; "
            f"use optim=adamw or optim=sgd."
        )
    if config.needs_full_params:
        group = context.mesh[model.shard_mesh_dim].get_group()
        return FullParamOptimizer(shards, group, lambda params: config.build(params, shapes))
    optimizer = config.build({name: cast("nn.Parameter", shard.tensor) for name, shard in shards.items()}, shapes)
    split_groups_by_mesh(optimizer)
    return optimizer
