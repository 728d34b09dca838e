"""Divides a model's layers among ranks that run it together, by transformers' tensor-parallel plan.

Each rank reads its own part of every weight from the checkpoint, however that was sharded. All ranks have the same
activations between layers, so they generate the same tokens.
"""

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import TensorIndex, load_shards
from fsdp_shard.distributed import DistributedContext, LocalShard, shard_of
from fsdp_shard.models import rebuild_buffers
from fsdp_shard.sharding import INFERENCE_STYLES, apply_tensor_parallel, check_tensor_parallel
from fsdp_shard.utils import format_size, persistent_buffers, replace_tensors


def load_divided(
    model: PreTrainedModel,
    index: TensorIndex,
    stored: Mapping[str, str],
    context: DistributedContext,
    log: Callable[[str], object],
) -> None:
    """Divide `model` among the ranks of the tensor-parallel mesh, and read this rank's part onto its device.

    Args:
        model: The model, on meta.
        index: The checkpoint.
        stored: Parameters and persistent buffers -> names in `index`.
        context: This rank, and the mesh of the ranks that divide the layers.
        log: Called with a summary before any weight is read.

    Raises:
        ConfigError: transformers has no usable plan for the model.
    """
    mesh, device = context.mesh["tensor"], context.device
    check_tensor_parallel(model, mesh.size(), "tensor_parallel", also=INFERENCE_STYLES)
    apply_tensor_parallel(model, mesh)
    replace_tensors(model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    rebuild_buffers(model, device)
    parts = {name: shard_of(param, writes=False) for name, param in model.named_parameters()}
    for _, _, name, buffer in persistent_buffers(model):
        parts[name] = LocalShard(buffer, buffer.detach().view(-1), 0, tuple(buffer.shape), writes=False)
    held = format_size(sum(part.data.nbytes for part in parts.values()))
    log(f"{index.path}: each layer is divided over {mesh.size()} ranks, {held} of weights on this one")
    load_shards(index, parts, stored)
    index.close()
