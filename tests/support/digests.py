"""The digests of tensors of an open checkpoint, to compare two of them by content."""

from __future__ import annotations

import xxhash

from fsdp_shard.checkpoint import TensorIndex


def digest_tensor(index: TensorIndex, name: str) -> str:
    """The digest of dtype, shape and bytes of a tensor, whatever files hold it."""
    entry = index.entry(name)
    content = bytearray(entry.num_bytes)
    index.read_into(name, 0, memoryview(content))
    return xxhash.xxh3_128_hexdigest(f"{entry.dtype} {entry.shape} ".encode() + content)


def tensor_digests(index: TensorIndex) -> dict[str, str]:
    """Name -> digest, of every tensor that is not tied to another."""
    return {name: digest_tensor(index, name) for name in index.names}
