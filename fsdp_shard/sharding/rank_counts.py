"""How the shard settings divide a number of ranks into shards, replicas and data ranks, and checks that they can."""

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.utils import format_count


def num_shards(shard: ShardConfig, num_ranks: int) -> int:
    """Number of ranks over which one replica of the model is sharded."""
    return num_ranks // (shard.replicas * shard.tensor_parallel) if shard.is_sharded else 1


def num_data_ranks(shard: ShardConfig, num_ranks: int) -> int:
    """Number of ranks, or of groups that share layers or sequences, with their own samples."""
    return num_ranks // (shard.tensor_parallel * shard.context_parallel)


def check_mesh(shard: ShardConfig, num_ranks: int) -> None:
    """Raise ConfigError if `num_ranks` ranks cannot form the mesh of these settings."""
    for divided in ("tensor_parallel", "expert_parallel", "context_parallel"):
        if (ranks := getattr(shard, divided)) > 1 and num_ranks % (shard.replicas * ranks):
            raise ConfigError(
                f"shard.replicas={shard.replicas} times shard.{divided}={ranks} does not divide the "
                f"{format_count(num_ranks, 'rank')} of this run."
            )
    if num_ranks % shard.replicas:
        raise ConfigError(
            f"shard.replicas={shard.replicas} does not divide the {format_count(num_ranks, 'rank')} of this run."
        )
    reshard, shards = shard.reshard_after_forward, num_shards(shard, num_ranks)
    if type(reshard) is int and (shards % reshard or reshard >= shards):
        raise ConfigError(
            f"shard.reshard_after_forward={reshard} must divide the {format_count(shards, 'rank')} that a replica is "
            f"sharded over, and be less; true reshards over all of them."
        )


def check_ranks(shard: ShardConfig, num_ranks: int, *, on_gpu: bool) -> None:
    """Raise ConfigError if the shard settings cannot work, or have no effect, on `num_ranks` ranks."""
    check_mesh(shard, num_ranks)
    for name in ("cpu_offload", "activation_offload"):
        if getattr(shard, name) and not on_gpu:
            raise ConfigError(f"shard.{name}=true needs a GPU to offload from; this run is on the CPU already.")


def check_accumulation(shard: ShardConfig, num_micro_batches: int) -> None:
    """Raise ConfigError if the wrapper cannot accumulate the gradients of `num_micro_batches` micro-batches."""
    keeps_last = not shard.accumulates_offloaded_gradients and shard.cpu_offload and shard.sync_every_micro_batch
    if keeps_last and num_micro_batches > 1:
        raise ConfigError(
            f"shard=fsdp1 with shard.cpu_offload=true keeps the gradients of the last of {num_micro_batches} "
            f"micro-batches only, a limit of torch's; use shard=fsdp2, a larger train.micro_batch_size, or "
            f"shard.sync_every_micro_batch=false with the same dtype for shard.param_dtype and shard.reduce_dtype."
        )
