"""Format `dcp`: directories of torch.distributed.checkpoint, with a `.metadata` and `.distcp` files.

`.metadata` is a pickle; it and the header of each item are read through our own allow-list (`torch_pickle`). Weights
are distinguished from optimizer and trainer states by the nesting that DCP records. torch is not imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.dcp_writer import plan_dcp as plan
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import Handles, find_torch_name, has_file, itemsize, member
from fsdp_shard.checkpoint.steps import DCP_METADATA
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry, checked
from fsdp_shard.checkpoint.torch_pickle import (
    CRC_IN_ENTRY,
    ENTRY_BYTES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StoredTensor,
    TensorStorageMetadata,
)
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular, read_bounded

__all__ = ["LISTS_TIED_NAMES", "NAME", "plan", "read", "recognize"]

NAME = "dcp"
LISTS_TIED_NAMES = True


def recognize(path: Path) -> bool:
    """A directory with a `.metadata` file."""
    return path.is_dir() and has_file(path, DCP_METADATA)


def read(path: Path) -> TensorIndex:
    """The index of the weights in a directory that `recognize` accepts."""
    metadata = _metadata(path)
    items = metadata.state_dict_metadata.items()
    tensors = {key: item for key, item in items if isinstance(item, TensorStorageMetadata)}
    num_pieces, num_stored = sum(len(item.chunks) for item in tensors.values()), len(metadata.storage_data)
    if num_pieces > 1000 + num_stored:  # of a few that are missing, the first is named when it is asked for
        raise CheckpointError(
            f"{path / DCP_METADATA} has {num_pieces} pieces of tensors, but only {num_stored} in files."
        )
    selection = torch_pickle.select_weights(
        {key: _keys(path / DCP_METADATA, metadata, key) for key in tensors}, path / DCP_METADATA
    )
    with closing(_Items(path)) as reader:
        found = {
            fqn: _entry(path, fqn, key, tensors[key], metadata.storage_data, reader)
            for key, fqn in selection.names.items()
        }
    kept, aliases = torch_pickle.without_copies(found, path)
    extras = {kind: _extra(path, keys, tensors) for kind, keys in selection.extras.items()}
    writers = {piece.file for entry in kept.values() for piece in entry.pieces}
    return TensorIndex(path, NAME, kept, aliases, world_size=len(writers), extras=extras)


def _metadata(path: Path) -> Metadata:
    where = member(path, DCP_METADATA)
    metadata = torch_pickle.load(read_bounded(where, "metadata_bytes"), str(where))
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{where} holds a {type(metadata).__name__}, not the Metadata of a DCP checkpoint.")
    for key, item in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(item, (TensorStorageMetadata, BytesStorageMetadata)):
            raise CheckpointError(
                f"{where} has {str(key)[:80]!r} as a {type(item).__name__}, which is nothing that DCP stores."
            )
    storage = metadata.storage_data
    if not isinstance(storage, Mapping) or not all(
        isinstance(key, MetadataIndex) and isinstance(info, StorageInfo) for key, info in storage.items()
    ):
        raise CheckpointError(f"{where} does not say where its tensors are: it is not of torch's file system writer.")
    return metadata


def _keys(where: Path, metadata: Metadata, key: str) -> Sequence[object]:
    """The keys of a tensor in the nested state dict; only its flat name where DCP did not record any.

    DCP's name of a tensor is its keys with dots between them: other keys would make a weight of an optimizer's state.
    """
    if not isinstance(metadata.planner_data, Mapping) or not metadata.planner_data:
        return (key,)
    recorded = metadata.planner_data.get(key)
    if not isinstance(recorded, tuple) or ".".join(map(str, recorded)) != key:
        raise CheckpointError(
            f"{where} has tensor {key}, but its planner data has it under the keys {str(recorded)[:200]}: the metadata "
            f"is damaged, or of another checkpoint."
        )
    return recorded


_Storage = Mapping[Any, StorageInfo]


def _storage_of(path: Path, key: str, offsets: tuple[int, ...], storage: _Storage) -> StorageInfo:
    info = storage.get(MetadataIndex(key, offsets))
    if info is None:
        raise CheckpointError(f"{path / DCP_METADATA} has tensor {key} at {list(offsets)}, but does not say where.")
    if info.transform_descriptors:
        raise CheckpointError(
            f"{path / DCP_METADATA}: tensor {key} was written through {info.transform_descriptors!r}; only plain "
            "files are read. Load it with torch and save it without compression."
        )
    return info


@dataclass(frozen=True)
class _Item:
    """A known item: the bytes before its tensor, and the rest of the directory entry that has the tensor's CRC.

    Another item with the same bytes has its tensor at the same position.
    """

    offset: int
    head: bytes
    rest: bytes
    tensor: StoredTensor

    @classmethod
    def of(cls, handle: int, offset: int, tensor: StoredTensor) -> _Item:
        """The item at byte `offset` of an open file, which was found to hold `tensor`."""
        head, member = os.pread(handle, tensor.start - offset, offset), tensor.member
        return cls(offset, head, b"" if member is None else _crc_and_rest(handle, member.crc_at)[1], tensor)

    def at(self, handle: int, offset: int) -> StoredTensor | None:
        """The tensor of the item at another `offset`, if that item is alike."""
        if os.pread(handle, len(self.head), offset) != self.head:
            return None
        moved, member = offset - self.offset, self.tensor.member
        if member is not None:
            crc, rest = _crc_and_rest(handle, member.crc_at + moved)
            if rest != self.rest:
                return None
            member = replace(member, start=member.start + moved, crc=crc, crc_at=member.crc_at + moved)
        return replace(self.tensor, start=offset + len(self.head), member=member)


def _crc_and_rest(handle: int, crc_at: int) -> tuple[int, bytes]:
    """The CRC in the directory entry of a member, and the entry without it."""
    entry = os.pread(handle, ENTRY_BYTES, crc_at - CRC_IN_ENTRY)
    stop = CRC_IN_ENTRY + 4
    return int.from_bytes(entry[CRC_IN_ENTRY:stop], "little"), entry[:CRC_IN_ENTRY] + entry[stop:]


class _Items:
    """Finds the tensor in each item of the `.distcp` files.

    Items of one writer begin with the same bytes if dtype and shape are the same. So the archive around a tensor is
    parsed once per such header, and recognized after that: a hundred times faster, and most items of a model are alike.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles = Handles(lambda name: open_regular(member(root, name)))
        self._known: dict[int, list[_Item]] = {}  # by length of the item

    def tensor(self, info: StorageInfo, key: str) -> StoredTensor:
        """The tensor in the item, which must be one plain tensor."""
        with self._handles.use(info.relative_path) as handle:
            size, end = os.fstat(handle).st_size, info.offset + info.length
            if end > size:
                raise CheckpointError(
                    f"{self._root / info.relative_path} has {size} bytes, but tensor {key} ends at byte {end} of it: "
                    "the file was cut short."
                )
            known = self._known.setdefault(info.length, [])
            for item in known:
                if (same := item.at(handle, info.offset)) is not None:
                    return same
            where = self._root / info.relative_path
            name = f"{where} (tensor {key}, from byte {info.offset} on)"
            found = torch_pickle.read_torch_bytes(handle, info.offset, info.length, name)
            found = torch_pickle.readable(found, key, where)
            known.append(_Item.of(handle, info.offset, found))
            return found

    def close(self) -> None:
        """Close the files."""
        self._handles.close()


def _entry(
    path: Path, fqn: str, key: str, item: TensorStorageMetadata, storage: _Storage, items: _Items
) -> TensorEntry:
    dtype = _dtype(path, fqn, item)
    pieces: list[Piece] = []
    for chunk in item.chunks:
        info = _storage_of(path, key, chunk.offsets, storage)
        found = items.tensor(info, fqn)
        if (found.dtype, found.shape) != (dtype, chunk.sizes):
            raise CheckpointError(
                f"{path / info.relative_path} holds {found.dtype} {list(found.shape)} as the piece of tensor {fqn} at "
                f"{list(chunk.offsets)}, but {DCP_METADATA} says {dtype} {list(chunk.sizes)}."
            )
        pieces.append(torch_pickle.piece_of(info.relative_path, found, chunk.offsets))
    return checked(path, fqn, dtype, item.size, pieces)


def _dtype(path: Path, name: str, item: TensorStorageMetadata) -> str:
    found = find_torch_name(str(item.properties.dtype))
    if found is None:
        raise CheckpointError(
            f"{path / DCP_METADATA}: tensor {name} is of {item.properties.dtype}, which is not supported."
        )
    return found


def _extra(path: Path, keys: Iterable[str], tensors: Mapping[str, TensorStorageMetadata]) -> Extra:
    sizes = [math.prod(tensors[key].size) * itemsize(_dtype(path, key, tensors[key])) for key in keys]
    return Extra(len(sizes), sum(sizes))
