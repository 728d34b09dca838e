"""Which weights lie at a path, by a digest of their content that does not depend on the layout. Imports no torch."""

from typing import Any

import xxhash

from fsdp_shard.checkpoint import Location, TensorIndex, itemsize
from fsdp_shard.utils import report_progress

_READ_BYTES = 1 << 20


def weights_digest(index: TensorIndex) -> str:
    """Return the xxh3_128 of names, dtypes, shapes and all bytes of the stored tensors, in the order of their names.

    It does not depend on how they are divided into files: a checkpoint that is converted within its dtype keeps it,
    unless tied tensors are stored twice in one of the two. All weights are read for it.
    """
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with report_progress(index.num_bytes, "digest of the weights", "B") as count:
        for name in sorted(index.names):
            entry = index.entry(name)
            size = itemsize(entry.dtype)
            digest.update(f"{name} {entry.dtype} {tuple(entry.shape)} ".encode())
            for start in range(0, entry.num_elements, _READ_BYTES // size):
                part = buffer[: min(_READ_BYTES // size, entry.num_elements - start) * size]
                index.read_into(name, start, part)
                digest.update(part)
                count(len(part))
    return digest.hexdigest()


def describe_weights(source: Location) -> dict[str, Any]:
    """Return, as JSON, which weights lie at `source`: path, format, step and digest, of an adapter its base's, too."""
    found = {"path": source.path, "format": source.format, "step": source.step, "digest": weights_digest(source.index)}
    return found | ({"base": describe_weights(source.base)} if source.is_adapter else {})
