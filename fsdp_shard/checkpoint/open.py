"""Opening any checkpoint, on this machine or on a remote store."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.remote.url import is_remote


def open_checkpoint(path: str | Path) -> TensorIndex:
    """The tensor index of what lies at `path`, recognized by content.

    A directory or a file of a known format, a step directory, a run directory (its latest step), or one of these two on
    a remote store, which is downloaded into a cache. Headers only are read. Raises CheckpointError naming the file that
    is wrong, or saying what was found instead of a checkpoint.
    """
    from fsdp_shard.checkpoint.open_local import open_local

    return open_local(here(path))


def here(path: str | os.PathLike[str]) -> Path:
    """`path` on this machine: what it is, or where the step that lies at a remote address is downloaded to."""
    if not is_remote(path):
        return Path(path).expanduser()
    from fsdp_shard.checkpoint.remote.download import local_copy

    return local_copy(str(path))
