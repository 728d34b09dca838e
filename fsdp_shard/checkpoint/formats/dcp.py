"""Format `dcp`: directories of torch.distributed.checkpoint, with a `.metadata` and `.distcp` files.

`.metadata` is a pickle; it and the header of each item are read through our own allow-list (`torch_pickle`). Weights
are distinguished from optimizer and trainer states by the nesting that DCP records. torch is not imported.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.dcp_writer import plan_dcp as plan
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import Handles, find_torch_name, has_file, itemsize, member, open_regular
from fsdp_shard.checkpoint.steps import DCP_METADATA
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry, checked
from fsdp_shard.checkpoint.torch_pickle import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StoredTensor,
    TensorStorageMetadata,
)
from fsdp_shard.errors import CheckpointError

__all__ = ["LISTS_TIED_NAMES", "NAME", "plan", "read", "recognize"]

NAME = "dcp"
LISTS_TIED_NAMES = True

_MAX_METADATA = 1 << 30


def recognize(path: Path) -> bool:
    """A directory with a `.metadata` file."""
    return path.is_dir() and has_file(path, DCP_METADATA)


def read(path: Path) -> TensorIndex:
    """The index of the weights in a directory that `recognize` accepts."""
    metadata = _metadata(path)
    items = metadata.state_dict_metadata.items()
    tensors = {key: item for key, item in items if isinstance(item, TensorStorageMetadata)}
    selection = torch_pickle.select_weights({key: _keys(metadata, key) for key in tensors}, path / DCP_METADATA)
    with closing(_Items(path)) as reader:
        found = {
            fqn: _entry(path, fqn, key, tensors[key], metadata.storage_data, reader)
            for key, fqn in selection.names.items()
        }
    kept, aliases = torch_pickle.without_copies(found)
    extras = {kind: _extra(path, keys, tensors) for kind, keys in selection.extras.items()}
    writers = {piece.file for entry in kept.values() for piece in entry.pieces}
    return TensorIndex(path, NAME, kept, aliases, world_size=len(writers), extras=extras)


def _metadata(path: Path) -> Metadata:
    where = member(path, DCP_METADATA)
    with os.fdopen(open_regular(where), "rb") as file:
        data = file.read(_MAX_METADATA + 1)
    if len(data) > _MAX_METADATA:
        raise CheckpointError(f"{where} is larger than {_MAX_METADATA} bytes, so it is not read.")
    metadata = torch_pickle.load(data, str(where))
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


def _keys(metadata: Metadata, key: str) -> Sequence[object]:
    """The keys of a tensor in the nested state dict; only its flat name where DCP did not record them."""
    recorded = metadata.planner_data.get(key) if isinstance(metadata.planner_data, Mapping) else None
    return recorded if isinstance(recorded, tuple) and recorded else (key,)


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


class _Items:
    """Finds the tensor in each item of the `.distcp` files.

    Items of one writer begin with the same bytes if dtype and shape are the same. So the archive around a tensor is
    parsed once per such header, and recognized after that: a hundred times faster, and most items of a model are alike.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles = Handles(lambda name: open_regular(member(root, name)))
        self._headers: dict[int, list[tuple[bytes, StoredTensor]]] = {}  # by length of the item

    def tensor(self, info: StorageInfo, key: str) -> StoredTensor:
        """The tensor in the item, which must be one plain tensor."""
        with self._handles.use(info.relative_path) as handle:
            size, end = os.fstat(handle).st_size, info.offset + info.length
            if end > size:
                raise CheckpointError(
                    f"{self._root / info.relative_path} has {size} bytes, but tensor {key} ends at byte {end} of it: "
                    "the file was cut short."
                )
            known = self._headers.setdefault(info.length, [])
            for header, tensor in known:
                if os.pread(handle, len(header), info.offset) == header:
                    return replace(tensor, start=info.offset + len(header))
            where = self._root / info.relative_path
            item = f"{where} (tensor {key}, from byte {info.offset} on)"
            found = torch_pickle.read_torch_bytes(handle, info.offset, info.length, item)
            found = torch_pickle.readable(found, key, where)
            known.append((os.pread(handle, found.start - info.offset, info.offset), found))
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
