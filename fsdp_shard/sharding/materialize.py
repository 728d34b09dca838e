"""Unfilled memory for the parameters and buffers that a model has on meta; tied parameters stay tied."""

import weakref
from collections.abc import Callable

import torch
from torch import nn

from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.sharding.activation_checkpointing import clean_fqn
from fsdp_shard.utils import give_back_free_memory, persistent_buffers

_LARGE_BYTES = 1 << 20


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Give persistent buffers that are still on meta memory on `device`, unfilled."""
    for owner, name, _, buffer in persistent_buffers(module):
        if buffer.is_meta:
            setattr(owner, name, torch.empty_like(buffer, device=device))


def empty_parameters(device: torch.device) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives one module's own parameters memory, unfilled; tied ones stay tied."""
    # The meta parameter is kept, so that ids stay unique; the real one is not, so that a sharded unit is free.
    made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def init(module: nn.Module) -> None:
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not param.is_meta:
                continue
            known = made[id(param)][1]() if id(param) in made else None
            if known is None:
                if device.type == "cpu" and param.numel() * param.element_size() >= _LARGE_BYTES:
                    give_back_free_memory()  # what the unit before left when it was sharded
                known = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                made[id(param)] = param, weakref.ref(known)
            setattr(module, name, known)

    return init


def buffer_shards(module: nn.Module, context: DistributedContext) -> dict[str, LocalShard]:
    """Every persistent buffer as a LocalShard that is the whole buffer."""
    return {
        clean_fqn(fqn): LocalShard(buffer, buffer.detach().reshape(-1), 0, tuple(buffer.shape), writes=context.is_main)
        for _, _, fqn, buffer in persistent_buffers(module)
    }
