"""Compilation block by block: one graph serves all blocks of a kind, and gathering parameters stays outside of it.

Only the `forward` of a block is replaced, so that no name of a parameter changes.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import nearest


def check_backend(backend: bool | str) -> None:
    """Raise ConfigError unless torch.compile has this backend; true is its default and false none."""
    if isinstance(backend, bool):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"shard.compile={backend} is neither true, false nor a backend of torch.compile: "
            f"{', '.join(known)}{nearest(backend, known)}."
        )


def compile_blocks(blocks: Iterable[nn.Module], backend: bool | str) -> None:
    """Compile each of `blocks` when it first runs, unless `backend` is false."""
    if backend is False:
        return
    for block in blocks:
        block.forward = torch.compile(block.forward, backend="inductor" if backend is True else backend)
