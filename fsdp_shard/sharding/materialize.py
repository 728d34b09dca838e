"""Memory, unfilled, for what a model has on meta; tied parameters stay tied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsdp_shard.distributed import LocalShard
from fsdp_shard.sharding.activation_checkpointing import clean_fqn
from fsdp_shard.utils import give_back_free_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_shard.distributed import DistributedContext


_LARGE_BYTES = 1 << 20


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Give persistent buffers that are still on meta memory on `device`, unfilled."""
    import torch

    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


def empty_parameters(device: torch.device) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that gives one module's own parameters memory, unfilled; tied ones stay tied."""
    import torch

    # The meta parameter is kept, so that ids stay unique; the real one is not, so that a sharded unit is free.
    made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def init(module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            known = made[id(param)][1]() if id(param) in made else None
            if known is None:
                if device.type == "cpu" and param.numel() * param.element_size() >= _LARGE_BYTES:
                    give_back_free_memory()  # what the unit before left when it was sharded
                empty = torch.empty_like(param, device=device)
                known = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
                made[id(param)] = param, weakref.ref(known)
            module._parameters[name] = known

    return init


def buffer_shards(module: nn.Module, context: DistributedContext) -> dict[str, LocalShard]:
    """A LocalShard over the whole of each persistent buffer."""
    return {
        clean_fqn(f"{prefix}.{name}" if prefix else name): LocalShard(
            buffer, buffer.detach().reshape(-1), 0, tuple(buffer.shape), writes=context.is_main
        )
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
