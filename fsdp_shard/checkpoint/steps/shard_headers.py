"""Whether rank files have the headers that their index describes, without making the pieces of all tensors.

Tensors of one shape are divided alike. So what the header of a file must be is put together from few parts, and
compared as a whole, in a third of the time that reading the header into pieces takes.
"""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.io import FileHeader, itemsize, member
from fsdp_shard.checkpoint.piece_table import Division, Held
from fsdp_shard.checkpoint.steps.file_plan import SHARD_FORMAT_VERSION, SHARD_KEY, stored_shape
from fsdp_shard.checkpoint.steps.shard_index import ShardIndex
from fsdp_shard.utils import open_regular, parse_json, read_range

Json = dict[str, Any]


def has_described_headers(root: Path, index: ShardIndex) -> bool:
    """Whether each rank file in `root` has the header that a save writes where `index` is right.

    False says little: the header may say the same in another way, or be damaged. Who wants to know reads it.

    Args:
        root: The directory.
        index: The index in it.

    Raises:
        CheckpointError: A file cannot be read, or has a header that is no JSON.
    """
    described = _Described(index)
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
    """What a file holds of each tensor that is divided in one way: shape as stored, elements, and our entry of it."""

    shape: list[int]
    num_elements: int
    entry: Json


class _Described:
    """The headers that an index describes, in JSON."""

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
        """The tensors of the header of a rank's file, and our entry in its metadata."""
        files, stored, entries = self._index.files, {}, {}
        for at, offset in files.layouts[files.layout_of[rank]].items():
            name, dtype, size, key = self._tensors[at]
            part = self._parts[key][rank]
            end = offset + part.num_elements * size
            stored[name] = {"dtype": dtype, "shape": part.shape, "data_offsets": [offset, end]}
            entries[name] = part.entry
        info = {
            "format_version": SHARD_FORMAT_VERSION,
            "rank": rank,
            "world_size": self._index.world_size,
            "step": self._index.step,
            "save": self._index.save,
            "aliases": self._index.aliases,
            "tensors": entries,
        }
        return stored, info


def _part(division: Division, held: Held) -> _Part:
    shape = list(division.shape)
    if held.box is None:
        stored = stored_shape(division.shape, held.start, held.num_elements)
        return _Part(list(stored), held.num_elements, {"shape": shape, "start": held.start})
    offsets, box = held.box
    start = tensor_slices.flat_start(division.shape, offsets)
    return _Part(list(box), math.prod(box), {"shape": shape, "start": start, "offsets": list(offsets)})
