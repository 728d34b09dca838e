"""Activation checkpointing along the blocks: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016)."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_shard.blocks import no_split_blocks

# The wrappers' own levels in parameter names, which no checkpoint may show.
_WRAPPER_LEVELS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def checkpoint_blocks(model: nn.Module, names: list[str]) -> None:
    """Replace each layer of `model` by one that keeps only its inputs and is computed again in the backward pass."""
    for block in no_split_blocks(model, names):
        if block.repeated:
            parent, _, child = block.fqn.rpartition(".")
            owner = model.get_submodule(parent)
            wrapped = checkpoint_wrapper(owner.get_submodule(child), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            owner.register_module(child, wrapped)


def clean_fqn(name: str) -> str:
    """`name` as the unwrapped model has it."""
    for level in _WRAPPER_LEVELS:
        name = name.replace(level, "")
    return name
