"""The wrappers by name, and sharding a model from Python. A new wrapper is one more line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig, ShardedModel
from fsdp_shard.sharding.ddp import DdpConfig
from fsdp_shard.sharding.fsdp1 import Fsdp1Config
from fsdp_shard.sharding.fsdp2 import Fsdp2Config
from fsdp_shard.sharding.mesh import check_ranks
from fsdp_shard.utils import check, nearest

if TYPE_CHECKING:
    from torch import nn

    from fsdp_shard.distributed import DistributedContext

WRAPPERS: dict[str, type[ShardConfig]] = {"fsdp2": Fsdp2Config, "fsdp1": Fsdp1Config, "ddp": DdpConfig}


def shard(model: nn.Module, context: DistributedContext, wrapper: str = "fsdp2", **settings: Any) -> ShardedModel:
    """Shard `model` along its no-split blocks over the ranks of `context`.

    Weights that are filled are kept; those of a model on the meta device are left unfilled.

    Args:
        model: The model, on the device of `context` or on meta with its buffers rebuilt.
        context: The ranks, from `init_distributed`.
        wrapper: `fsdp2`, `fsdp1` or `ddp`.
        settings: Those of `shard.*`, such as `param_dtype="float32"`.

    Returns:
        The sharded model.

    Raises:
        ConfigError: The wrapper or a setting does not exist, or cannot work with this model and these ranks.
        ModelError: No blocks are found in the model.

    Example:
        >>> with fsdp_shard.init_distributed() as context:  # doctest: +SKIP
        ...     sharded = fsdp_shard.shard(model, context, "fsdp2", param_dtype="float32")
    """
    if wrapper not in WRAPPERS:
        raise ConfigError(f"shard={wrapper} is not one of {', '.join(WRAPPERS)}{nearest(wrapper, list(WRAPPERS))}.")
    known = list(WRAPPERS[wrapper].__dataclass_fields__)
    for name in settings:
        if name not in known:
            raise ConfigError(f"shard.{name} is not a setting of {wrapper}{nearest(name, known)}.")
    config = WRAPPERS[wrapper](**settings)
    check(config)
    check_ranks(config, context.world_size, on_gpu=context.device.type == "cuda")
    joined = {"tensor_parallel": context.num_tensor_ranks, "expert_parallel": context.num_expert_ranks}
    for name, ranks in joined.items():
        if (given := getattr(config, name)) != ranks:
            raise ConfigError(
                f"{name}={given}, but the process group was initialized with {name}={ranks}; pass the same to both."
            )
    return config.shard(model, context)
