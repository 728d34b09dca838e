"""The lines of a run that describe its model: size, sharding, memory that loading took, frozen tensors, adapter."""

from math import prod

from torch import nn

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig, attention_implementations
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training.load_model import LoadedModel
from fsdp_shard.utils import format_count, format_number, format_size


def describe_loaded_model(
    loaded: LoadedModel, config: ModelConfig, shard: ShardConfig, context: DistributedContext
) -> list[str]:
    """Describe the model, its sharding, and the memory that loading took, one line each."""
    figures = loaded.figures
    mesh = format_count(context.world_size, f"{context.device.type} rank")
    divided = {"layers": context.num_tensor_ranks, "experts": context.num_expert_ranks}
    for what, num_ranks in (divided | {"sequences": context.num_context_ranks}).items():
        if num_ranks > 1:
            mesh += f" ({what} divided over {num_ranks})"
    if context.num_replicas > 1:
        mesh += f" ({context.num_replicas} replicas of {context.world_size // context.num_replicas})"
    used = attention_implementations(loaded.model.module)
    attention = f" with {' and '.join(used)} attention" if used else ""
    lines = [
        f"{config.path}: {format_number(loaded.num_params)} parameters in {loaded.num_blocks} blocks on {mesh}, "
        f"{shard.wrapper.upper()}, computing in {shard.param_dtype}{attention}",
        f"loaded: {format_size(figures.shard_bytes)} of weights per rank, peak memory "
        f"{format_size(figures.peak_memory_bytes)}",
        *loaded.notes,
        *loaded.tree,
    ]
    if loaded.num_fused:
        lines.append(f"{format_count(loaded.num_fused, 'module')} with fused kernels ({config.kernels})")
    if loaded.adapter is None:
        params = [part for part in loaded.model.local_shards().values() if isinstance(part.tensor, nn.Parameter)]
        frozen = sum(not part.tensor.requires_grad for part in params if prod(part.shape))
        lines += [f"frozen: {frozen} of {format_count(len(params), 'tensor')}"] if frozen else []
    else:
        lines.append(loaded.adapter.describe(loaded.model.local_shards()))
    if getattr(loaded.config, "output_router_logits", False):
        lines.append(
            "config.json has output_router_logits, but the loss here does not include the router's auxiliary loss"
        )
    return lines
