"""torch DCP directories: `.metadata`, and the `.distcp` files in which it says that the pieces of tensors lie.

`.metadata` is a pickle; it is read by our own allow-list (`pickles`), and so is the head of each item. Optimizer states
and a trainer's own values are told from weights by the nesting that DCP records. torch is not imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats.dcp_writer import plan_dcp as plan
from fsdp_shard.checkpoint.index import Extra, Piece, TensorEntry, TensorIndex, checked
from fsdp_shard.checkpoint.io.dtypes import find_torch_name, itemsize
from fsdp_shard.checkpoint.io.files import Handles, has_file, member, open_regular
from fsdp_shard.checkpoint.keys.wrapper_prefixes import Selection, split_state
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA
from fsdp_shard.checkpoint.torch_pickle.allow_list import (
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorStorageMetadata,
    load,
)
from fsdp_shard.checkpoint.torch_pickle.state_dict import without_copies
from fsdp_shard.checkpoint.torch_pickle.torch_zip import StoredTensor, Unreadable, piece_of, read_torch_bytes
from fsdp_shard.errors import CheckpointError

__all__ = ["LISTS_TIED_NAMES", "NAME", "plan", "read", "recognize"]

NAME = "dcp"
LISTS_TIED_NAMES = True

_MAX_METADATA = 1 << 30


def recognize(path: Path) -> bool:
    """A directory with a `.metadata` file."""
    return path.is_dir() and has_file(path, DCP_METADATA)


def read(path: Path) -> TensorIndex:
    """The index of the weights in a directory that `recognize` took."""
    metadata = _metadata(path)
    tensors = {key: item for key, item in metadata.state_dict_metadata.items() if _is_tensor(item)}
    try:
        selection = split_state({key: _path(metadata, key) for key in tensors})
    except CheckpointError as error:
        raise CheckpointError(f"{path / DCP_METADATA}: {error}") from None
    if not selection.names:
        raise CheckpointError(f"{path} holds {_kinds(selection)} but no weights; give the directory with the weights.")
    with closing(_Items(path)) as items:
        found = {
            fqn: _entry(path, fqn, tensors[key], _places(path, key, tensors[key], metadata.storage_data), items)
            for key, fqn in selection.names.items()
        }
    kept, aliases = without_copies(found)
    extras = {kind: _extra(path, keys, tensors) for kind, keys in selection.extras.items()}
    return TensorIndex(path, NAME, kept, aliases, world_size=_world_size(kept.values()), extras=extras)


def _metadata(path: Path) -> Metadata:
    where = member(path, DCP_METADATA)
    with os.fdopen(open_regular(where), "rb") as file:
        data = file.read(_MAX_METADATA + 1)
    if len(data) > _MAX_METADATA:
        raise CheckpointError(f"{where} is larger than {_MAX_METADATA} bytes, so it is not read.")
    metadata = load(data, str(where))
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{where} holds a {type(metadata).__name__}, not the Metadata of a DCP checkpoint.")
    storage = metadata.storage_data
    if not isinstance(storage, Mapping) or not all(
        isinstance(key, MetadataIndex) and isinstance(info, StorageInfo) for key, info in storage.items()
    ):
        raise CheckpointError(f"{where} does not say where its tensors lie, so torch's file system writer is not its.")
    return metadata


def _is_tensor(item: object) -> bool:
    return isinstance(item, TensorStorageMetadata)


def _path(metadata: Metadata, key: str) -> Sequence[object]:
    """The keys that led to a tensor in the state dict; the flat name alone where DCP did not record them."""
    recorded = metadata.planner_data.get(key) if isinstance(metadata.planner_data, Mapping) else None
    return recorded if isinstance(recorded, tuple) and recorded else (key,)


def _kinds(selection: Selection) -> str:
    parts = [f"{len(keys):,} tensors of the kind {kind}" for kind, keys in selection.extras.items()]
    return " and ".join(parts) or "nothing"


_Place = tuple[tuple[int, ...], tuple[int, ...], StorageInfo]  # offsets, sizes, where


def _places(path: Path, key: str, item: TensorStorageMetadata, storage: Mapping[Any, StorageInfo]) -> list[_Place]:
    places = []
    for chunk in item.chunks:
        info = storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise CheckpointError(
                f"{path / DCP_METADATA} has tensor {key} at {list(chunk.offsets)}, but does not say where."
            )
        if info.transform_descriptors:
            raise CheckpointError(
                f"{path / DCP_METADATA}: tensor {key} was written through {info.transform_descriptors!r}; only plain "
                "files are read. Load it with torch and save it without compression."
            )
        places.append((chunk.offsets, chunk.sizes, info))
    return places


class _Items:
    """Looks at the head of each item, to find the tensor in it.

    Items of one writer begin alike where dtype and shape are alike. So the archive around a tensor is taken apart once
    for each such head, and recognized after that: a hundred times faster, and most items of a model are alike.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles = Handles(lambda name: open_regular(member(root, name)))
        self._heads: dict[int, list[tuple[bytes, StoredTensor]]] = {}  # by length of the item

    def tensor(self, info: StorageInfo, key: str) -> StoredTensor:
        """What lies in the item, which must be one plain tensor."""
        with self._handles.use(info.relative_path) as handle:
            self._check_end(handle, info, key)
            known = self._heads.setdefault(info.length, [])
            for head, tensor in known:
                if os.pread(handle, len(head), info.offset) == head:
                    return replace(tensor, start=info.offset + len(head))
            where = self._root / info.relative_path
            item = f"{where} (tensor {key}, from byte {info.offset} on)"
            found = read_torch_bytes(handle, info.offset, info.length, item)
            if not isinstance(found, StoredTensor):
                kind = found.problem if isinstance(found, Unreadable) else f"is a {type(found).__name__}"
                raise CheckpointError(f"{where}: what is stored as tensor {key} {kind}; only plain tensors are read.")
            known.append((os.pread(handle, found.start - info.offset, info.offset), found))
            return found

    def _check_end(self, handle: int, info: StorageInfo, key: str) -> None:
        size, end = os.fstat(handle).st_size, info.offset + info.length
        if end > size:
            where = self._root / info.relative_path
            raise CheckpointError(
                f"{where} has {size} bytes, but tensor {key} reaches to byte {end} of it: the file was cut short."
            )

    def close(self) -> None:
        self._handles.close()


def _entry(path: Path, fqn: str, item: TensorStorageMetadata, places: list[_Place], items: _Items) -> TensorEntry:
    dtype = _dtype(path, fqn, item)
    pieces: list[Piece] = []
    for offsets, sizes, info in places:
        found = items.tensor(info, fqn)
        if (found.dtype, found.shape) != (dtype, sizes):
            raise CheckpointError(
                f"{path / info.relative_path} holds {found.dtype} {list(found.shape)} as the piece of tensor {fqn} at "
                f"{list(offsets)}, but {DCP_METADATA} says {dtype} {list(sizes)}."
            )
        pieces.append(piece_of(info.relative_path, found, offsets))
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


def _world_size(entries: Iterable[TensorEntry]) -> int:
    """As many ranks as wrote files."""
    return len({piece.file for entry in entries for piece in entry.pieces})
