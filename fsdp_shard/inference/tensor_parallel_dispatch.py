"""A model whose layers are divided over ranks that run it together, by transformers' tensor-parallel plan.

Each rank reads its own part of every weight from the checkpoint, whatever it was sharded by. All of them hold the same
activations between layers, so they draw the same tokens. Knows no prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint import TensorIndex, load_shards
from fsdp_shard.distributed import LocalShard
from fsdp_shard.models import rebuild_buffers
from fsdp_shard.sharding import RUN_ONLY_STYLES, check_plan, divide_layers, part_of
from fsdp_shard.utils import format_size

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def divide(model: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> str:
    """Cut `model`, on meta, over the ranks of `mesh` and give this rank's part memory on `device`, unfilled.

    Returns what was done, in words. Raises ConfigError where transformers has no plan that can be followed.
    """
    check_plan(model, mesh.size(), "tensor_parallel", also=RUN_ONLY_STYLES)
    divide_layers(model, mesh)
    _give_memory(model, device)
    rebuild_buffers(model, device)
    held = sum(part.data.nbytes for part in _parts(model).values())
    return f"each layer is divided over {mesh.size()} ranks, {format_size(held)} of weights on this one"


def fill(model: PreTrainedModel, index: TensorIndex, stored: Mapping[str, str]) -> None:
    """Read this rank's parts; `stored` maps parameters and persistent buffers to names in `index`."""
    load_shards(index, _parts(model), stored)
    index.close()


def _parts(model: nn.Module) -> dict[str, LocalShard]:
    kept = model.state_dict(keep_vars=True)
    parts = {name: part_of(param, writes=False) for name, param in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name in kept:
            parts[name] = LocalShard(buffer, buffer.detach().view(-1), 0, tuple(buffer.shape), writes=False)
    return parts


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """`torch.empty_like` for all that is on meta; tied parameters stay tied."""
    import torch

    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
