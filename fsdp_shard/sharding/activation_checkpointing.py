"""Activation checkpointing and offload of blocks: their forward pass keeps less for the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Selective checkpointing keeps the results of matrix
products and of attention, which take nearly all of the time, and recomputes the rest. Only the `forward` of a block is
replaced, so that no name of a parameter changes.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from fsdp_shard.models import no_split_blocks
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.utils import costly_operators, view_base

_Forward = Callable[..., Any]

# The levels that wrappers add to parameter names, which must not get into a checkpoint.
_WRAPPER_LEVELS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def recompute_blocks(model: nn.Module, settings: ShardConfig) -> list[nn.Module]:
    """Replace the forward of the repeated blocks of `model` by one that keeps less; returns all repeated blocks."""
    blocks = {
        block.fqn: model.get_submodule(block.fqn) for block in no_split_blocks(model, settings.blocks) if block.repeated
    }
    is_selective = settings.activation_checkpointing == "selective"
    contexts = partial(create_selective_checkpoint_contexts, _policy) if is_selective else noop_context_fn
    for fqn in recomputed_fqns(list(blocks), settings.activation_checkpointing):
        forward = blocks[fqn].forward
        kept = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        blocks[fqn].forward = wraps(forward)(kept)
    if settings.activation_offload:
        for block in blocks.values():
            block.forward = _offloaded(block.forward)
    return list(blocks.values())


def recomputed_fqns(blocks: Sequence[str], kind: bool | int | str) -> list[str]:
    """Those of `blocks` (FQNs) that `shard.activation_checkpointing=kind` recomputes in the backward pass."""
    if kind in ("none", "all", "selective") or isinstance(kind, bool):
        return list(blocks) if kind in (True, "all", "selective") else []
    assert isinstance(kind, int)
    return list(blocks[kind - 1 :: kind])


def is_saved_operator(operator: Any) -> bool:
    """Whether selective checkpointing keeps the results of `operator`: matrix products and attention."""
    return operator in costly_operators()


def clean_fqn(name: str) -> str:
    """The FQN in the unwrapped model of the parameter `name` of a wrapped one."""
    for level in _WRAPPER_LEVELS:
        name = name.replace(level, "")
    return name


def _offloaded(forward: _Forward) -> _Forward:
    """Move what autograd saves in `forward` to CPU memory until it is used, except parameters and views of them.

    torch's own `save_on_cpu` copies parameters too, which stay where they are, gathered or not.
    """

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(*args, **kwargs)

    return run


def _to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    if isinstance(view_base(tensor), nn.Parameter):
        return tensor.device, tensor
    # With the strides that it has: compiled backward passes were made for them.
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.preserve_format)
    return tensor.device, pinned.copy_(tensor)


def _from_host(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved_operator(operator) else CheckpointPolicy.PREFER_RECOMPUTE
