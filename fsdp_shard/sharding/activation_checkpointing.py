"""Activation checkpointing: blocks keep their inputs for the backward pass, and are computed again there.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Only the `forward` of a block is replaced, so
parameter names do not change.
"""

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_shard.models import no_split_blocks
from fsdp_shard.sharding.activations.selective_checkpointing import selective_contexts
from fsdp_shard.sharding.config import ShardConfig


def recompute_blocks(model: nn.Module, settings: ShardConfig) -> list[nn.Module]:
    """Replace the forward of the repeated blocks of `model` with one that keeps less.

    Returns:
        All repeated blocks, or none if no setting needs blocks: units by size (`min_params`) do not.
    """
    if settings.activation_checkpointing in (False, "none") and not (settings.compile or settings.activation_offload):
        return []
    blocks = {
        block.fqn: model.get_submodule(block.fqn) for block in no_split_blocks(model, settings.blocks) if block.repeated
    }
    for fqn in recomputed_fqns(list(blocks), settings.activation_checkpointing):
        forward = blocks[fqn].forward
        options: dict[str, Any] = {}
        if settings.activation_checkpointing == "selective":
            name, is_compiled = type(blocks[fqn]).__name__, settings.compile is not False
            has_units = settings.expert_parallel > 1
            options["context_fn"] = selective_contexts(name, compiled=is_compiled, has_units=has_units)
        blocks[fqn].forward = wraps(forward)(partial(checkpoint, forward, use_reentrant=False, **options))
    return list(blocks.values())


def recomputed_fqns(blocks: Sequence[str], kind: bool | int | str) -> list[str]:
    """The FQNs among `blocks` that `shard.activation_checkpointing=kind` recomputes in the backward pass."""
    if kind in ("none", "all", "selective") or isinstance(kind, bool):
        return list(blocks) if kind in (True, "all", "selective") else []
    assert isinstance(kind, int)
    return list(blocks[kind - 1 :: kind])
