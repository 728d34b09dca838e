"""The digests of all tensors of an open checkpoint, to compare two of them by content."""

from __future__ import annotations

from fsdp_shard.checkpoint import TensorIndex, digest_tensor


def tensor_digests(index: TensorIndex) -> dict[str, str]:
    """Name -> digest, of every tensor that is not tied to another."""
    return {name: digest_tensor(index, name) for name in index.names}
