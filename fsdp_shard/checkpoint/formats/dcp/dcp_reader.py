"""Format `dcp`: directories of torch.distributed.checkpoint, with a `.metadata` and `.distcp` files.

The pickle `.metadata` and each item's header are read through our own allow-list (`torch_pickle`). The nesting that DCP
records distinguishes weights from optimizer and trainer states. Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import Checksum, find_torch_name, has_file, itemsize, member
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry, checked_entry
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

NAME = "dcp"


def recognize(path: Path) -> bool:
    """Return whether `path` is a directory with a `.metadata` file."""
    return path.is_dir() and has_file(path, DCP_METADATA)


def read(path: Path) -> TensorIndex:
    """Return the index of the weights in a directory that `recognize` accepts."""
    metadata, where = _metadata(path), path / DCP_METADATA
    tensors = {k: item for k, item in metadata.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)}
    num_pieces, num_stored = sum(len(item.chunks) for item in tensors.values()), len(metadata.storage_data)
    if num_pieces > 1000 + num_stored:  # if only a few are missing, `_entries` names the first of them
        raise CheckpointError(f"{where} has {num_pieces} pieces of tensors, but only {num_stored} in files.")
    selection = torch_pickle.select_weights({key: _keys(where, metadata, key) for key in tensors}, where)
    found = _entries(path, {fqn: (key, tensors[key]) for key, fqn in selection.names.items()}, metadata.storage_data)
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
    """Return a tensor's keys in the nested state dict; only its flat name if DCP did not record any.

    DCP names a tensor by its keys, joined with dots: other keys could turn optimizer state into a weight.
    """
    if not isinstance(planned := metadata.planner_data, Mapping) or not planned:
        return (key,)
    recorded = planned.get(key)
    if not isinstance(recorded, tuple) or ".".join(map(str, recorded)) != key:
        raise CheckpointError(
            f"{where} has tensor {key}, but its planner data has it under the keys {str(recorded)[:200]}: the metadata "
            f"is damaged, or of another checkpoint."
        )
    return recorded


@dataclass(frozen=True)
class _Known:
    """A parsed item: the bytes before its tensor, and the rest of the directory entry with the tensor's CRC.

    Another item with the same bytes has its tensor at the same position.
    """

    head: bytes
    rest: bytes
    piece: Piece
    num_bytes: int  # of the storage
    to_storage: int  # bytes from the beginning of the item
    to_crc: int

    @classmethod
    def of(cls, handle: int, item: StorageInfo, offsets: tuple[int, ...], tensor: StoredTensor) -> _Known:
        """Describe an item of an open file in which `tensor` was found."""
        head, member = os.pread(handle, tensor.start - item.offset, item.offset), tensor.member
        piece = torch_pickle.piece_of(item.relative_path, tensor, offsets)
        if member is None:
            return cls(head, b"", piece, 0, 0, 0)
        rest = _crc_and_rest(os.pread(handle, ENTRY_BYTES, member.crc_at - CRC_IN_ENTRY))[1]
        at = member.crc_at - CRC_IN_ENTRY
        return cls(head, rest, piece, member.num_bytes, member.start - item.offset, at - item.offset)

    def piece_in(self, handle: int, item: StorageInfo, offsets: tuple[int, ...]) -> Piece | None:
        """Return the piece in another item, or None if that item differs."""
        start, head = item.offset, self.head
        if os.pread(handle, len(head), start) != head:
            return None
        checksum = None
        if self.to_crc:
            crc, rest = _crc_and_rest(os.pread(handle, ENTRY_BYTES, start + self.to_crc))
            if rest != self.rest:
                return None
            if crc:
                checksum = Checksum(start + self.to_storage, self.num_bytes, crc)
        return Piece(item.relative_path, start + len(head), offsets, self.piece.shape, self.piece.codec, checksum)


def _crc_and_rest(entry: bytes) -> tuple[int, bytes]:
    """Return the CRC in the directory entry of a member, and the entry without it."""
    stop = CRC_IN_ENTRY + 4
    return int.from_bytes(entry[CRC_IN_ENTRY:stop], "little"), entry[:CRC_IN_ENTRY] + entry[stop:]


class _Job(NamedTuple):
    """A piece to find: its tensor's name, its number among that tensor's pieces, and what the metadata says of it."""

    name: str
    number: int
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    item: StorageInfo


_NO_PIECE = Piece("", 0, (), ())


class _Items:
    """Finds the tensor in each item of the `.distcp` files.

    Items of one writer with the same dtype and shape begin with the same bytes. The archive around a tensor is
    therefore parsed once per header and recognized afterwards. That is a hundred times faster, as most items of a model
    are alike.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[tuple[int, str, tuple[int, ...]], list[_Known]] = {}  # by length, dtype and shape

    def pieces(self, file: str, jobs: Iterable[_Job]) -> Iterator[tuple[_Job, Piece]]:
        """Yield the pieces in one file, each of which must be one plain tensor of the dtype and shape of its job."""
        with os.fdopen(open_regular(member(self._root, file)), "rb", buffering=0) as opened:
            handle, size = opened.fileno(), os.fstat(opened.fileno()).st_size
            for job in jobs:
                end = job.item.offset + job.item.length
                if end > size:
                    raise CheckpointError(
                        f"{self._root / file} has {size} bytes, but tensor {job.name} ends at byte {end} of it: the "
                        "file was cut short."
                    )
                yield job, self._piece(handle, job)

    def _piece(self, handle: int, job: _Job) -> Piece:
        name, _, dtype, offsets, shape, item = job
        known = self._known.setdefault((item.length, dtype, shape), [])
        for one in known:
            if (same := one.piece_in(handle, item, offsets)) is not None:
                return same
        where = self._root / item.relative_path
        what = f"{where} (tensor {name}, from byte {item.offset} on)"
        found = torch_pickle.read_torch_bytes(handle, item.offset, item.length, what)
        found = torch_pickle.readable(found, name, where)
        if (found.dtype, found.shape) != (dtype, shape):
            raise CheckpointError(
                f"{where} holds {found.dtype} {list(found.shape)} as the piece of tensor {name} at {list(offsets)}, "
                f"but {DCP_METADATA} says {dtype} {list(shape)}."
            )
        known.append(_Known.of(handle, item, offsets, found))
        return known[-1].piece


def _entries(
    path: Path, tensors: Mapping[str, tuple[str, TensorStorageMetadata]], storage: Mapping[MetadataIndex, StorageInfo]
) -> dict[str, TensorEntry]:
    """Return the entries of `tensors`, (key, metadata) by name; opens each file once, however many pieces it holds."""
    where = path / DCP_METADATA
    stored = {(at.fqn, at.offset): info for at, info in storage.items()}  # tuples are hashed faster
    dtypes = {name: _dtype(path, name, tensor) for name, (_, tensor) in tensors.items()}
    by_file: dict[str, list[_Job]] = {}
    for name, (key, tensor) in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            if (item := stored.get((key, chunk.offsets))) is None:
                raise CheckpointError(f"{where} has tensor {name} at {list(chunk.offsets)}, but does not say where.")
            if item.transform_descriptors:
                raise CheckpointError(
                    f"{where}: tensor {name} was written through {item.transform_descriptors!r}; only plain files are "
                    f"read. Load it with torch and save it without compression."
                )
            job = _Job(name, number, dtypes[name], chunk.offsets, chunk.sizes, item)
            by_file.setdefault(item.relative_path, []).append(job)
    items, pieces = _Items(path), {name: [_NO_PIECE] * len(tensor.chunks) for name, (_, tensor) in tensors.items()}
    for file, jobs in by_file.items():
        for job, piece in items.pieces(file, jobs):
            pieces[job.name][job.number] = piece
    return {name: checked_entry(path, name, dtypes[name], of.size, pieces[name]) for name, (_, of) in tensors.items()}


def _dtype(path: Path, name: str, tensor: TensorStorageMetadata) -> str:
    found = find_torch_name(tensor.properties.dtype)
    if found is None:
        raise CheckpointError(
            f"{path / DCP_METADATA}: tensor {name} is of {tensor.properties.dtype}, which is not supported."
        )
    return found


def _extra(path: Path, keys: Iterable[str], tensors: Mapping[str, TensorStorageMetadata]) -> Extra:
    sizes = [math.prod(tensors[key].size) * itemsize(_dtype(path, key, tensors[key])) for key in keys]
    return Extra(len(sizes), sum(sizes))
