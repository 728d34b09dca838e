"""Compiling block by block: one graph serves all blocks of a kind, and what gathers their parameters stays outside it.

The module itself is left in its place, only its `forward` is replaced, so that no name of a parameter changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import nearest


def check_backend(backend: bool | str) -> None:
    """Raise ConfigError unless torch.compile has a backend of this name; true and false are its default and none."""
    if isinstance(backend, bool):
        return
    from torch import _dynamo

    known = _dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"shard.compile={backend} is neither true, false nor a backend that torch.compile has here: "
            f"{', '.join(known)}{nearest(backend, known)}."
        )


def compile_blocks(blocks: Iterable[nn.Module], backend: bool | str) -> None:
    """Have each of `blocks` compiled when it first runs, if `backend` is not false."""
    if backend is False:
        return
    import torch

    for block in blocks:
        compiled = torch.compile(block.forward, backend="inductor" if backend is True else backend)
        block.forward = compiled
