"""Checks that rank files have the headers that their index describes, without creating the pieces of all tensors.

Tensors of one shape are divided in the same way. The expected header of a file is therefore assembled from few parts
and compared as a whole, in a third of the time needed to read the header into pieces.
"""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import FileHeader, itemsize, member
from fsdp_shard.checkpoint.piece_table import Division, Held
from fsdp_shard.checkpoint.steps.file_plan import SHARD_KEY, range_entry, shard_document, stored_shape
from fsdp_shard.checkpoint.steps.shard_index import ShardIndex
from fsdp_shard.utils import open_regular, parse_json, read_range

Json = dict[str, Any]


def has_described_headers(root: Path, index: ShardIndex) -> bool:
    """Whether each rank file in `root` has the header that a save with this `index` writes.

    False is inconclusive: the header may be equivalent or damaged; read it to find out.

    Args:
        root: The directory.
        index: The index in it.

    Raises:
        CheckpointError: A file cannot be read, or its header is not JSON.
    """
    described = _DescribedHeaders(index)
    files = enumerate(index.headers.items())
    return all(_has_header(member(root, file), header, *described.file(rank)) for rank, (file, header) in files)


def _has_header(path: Path, header: FileHeader, stored: Json, info: Json) -> bool:
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if (start, os.fstat(file.fileno()).st_size) != (header.header_bytes, header.num_bytes):
            return False
        data = read_range(file.fileno(), 8, start - 8, f"the header of {path}", "metadata_bytes")
    document = parse_json(data, f"the header of {path}")
    metadata = document.pop("__metadata__", None) if isinstance(document, dict) else None
    if document != stored or not isinstance(metadata, dict) or metadata.keys() != {"format", SHARD_KEY}:
        return False
    text = metadata[SHARD_KEY]
    if metadata["format"] != "pt" or not isinstance(text, str):
        return False
    found: Any = parse_json(text.encode(), f"the {SHARD_KEY} metadata of {path}")
    return bool(found == info)


class _Part(NamedTuple):
    """A file's part of each tensor with the same division: stored shape, elements, and our metadata entry."""

    shape: list[int]
    num_elements: int
    entry: Json


class _DescribedHeaders:
    """The headers that an index describes, as JSON."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._tensors = [
            (name, tensor.dtype, itemsize(tensor.dtype), id(division))
            for (name, tensor), division in zip(index.tensors.items(), index.divisions, strict=True)
        ]
        divisions = {id(division): division for division in index.divisions}
        self._parts = {
            key: {held.rank: _part(division, held) for held in division.held} for key, division in divisions.items()
        }

    def file(self, rank: int) -> tuple[Json, Json]:
        """The tensors in the header of a rank's file, and our entry in its metadata."""
        files, stored, entries = self._index.files, {}, {}
        for at, offset in files.layouts[files.layout_of[rank]].items():
            name, dtype, size, key = self._tensors[at]
            part = self._parts[key][rank]
            end = offset + part.num_elements * size
            stored[name] = {"dtype": dtype, "shape": part.shape, "data_offsets": [offset, end]}
            entries[name] = part.entry
        index = self._index
        return stored, shard_document(rank, index.world_size, index.step, index.save_id, index.aliases, entries)


def _part(division: Division, held: Held) -> _Part:
    if held.box is None:
        stored = stored_shape(division.shape, held.start, held.num_elements)
        return _Part(list(stored), held.num_elements, range_entry(division.shape, held.start))
    offsets, box = held.box
    start = tensor_slices.flat_start(division.shape, offsets)
    return _Part(list(box), math.prod(box), range_entry(division.shape, start, offsets))
