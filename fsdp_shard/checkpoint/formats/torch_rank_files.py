"""One file that torch.save wrote per rank, with DTensors (FSDP2, tensor parallelism) or FSDP1's ShardedTensors in it.

Known by `rank` and a number in the names (verl's `model_world_size_8_rank_0.pt`). Optimizer and trainer states beside
them count as extras. What replicas hold is taken once. Imports no torch, runs no pickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.checkpoint.index import Extra, Piece, TensorEntry, TensorIndex, checked
from fsdp_shard.checkpoint.io.files import has_file, member
from fsdp_shard.checkpoint.tensor_slices import Box
from fsdp_shard.checkpoint.torch_pickle.dtensor import AnyTensor
from fsdp_shard.checkpoint.torch_pickle.placements import local_boxes, local_spans
from fsdp_shard.checkpoint.torch_pickle.state_dict import added, extra_of, readable, walk, weights_of, without_copies
from fsdp_shard.checkpoint.torch_pickle.strided import box_of
from fsdp_shard.checkpoint.torch_pickle.torch_zip import (
    StoredDTensor,
    StoredShards,
    StoredTensor,
    is_torch_file,
    piece_of,
    read_torch_file,
)
from fsdp_shard.errors import CheckpointError

NAME = "torch_ranks"

_RANK = re.compile(r"(?P<stem>.*?)(?:world_size_?(?P<world>\d+)_?)?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin|ckpt)")
_OPTIMIZER = re.compile(r"optim")
_NO_WEIGHTS = re.compile(r"optim|extra|scheduler|scaler|rng|random|dataloader|sampler|trainer|zero_pp")


@dataclass(frozen=True)
class _File:
    name: str
    stem: str
    world_size: int | None
    rank: int


@dataclass(frozen=True)
class _Part:
    """What one rank's file holds of a tensor."""

    rank: int
    file: str
    where: Path
    tensor: AnyTensor


def recognize(path: Path) -> bool:
    """A directory with files of ranks that hold weights."""
    return path.is_dir() and any(is_torch_file(path / file.name) for file in _files(path) if not _is_extra(file))


def read(path: Path) -> TensorIndex:
    """The index over all ranks' files; each must be there, and together they must hold every tensor."""
    files = _model_files(path)
    parts: dict[str, list[_Part]] = {}
    extras: dict[str, Extra] = {}
    for file in files:
        where = member(path, file.name)
        weights, beside = weights_of(read_torch_file(where), where)
        extras = added(extras, beside)
        for name, tensor in weights.items():
            parts.setdefault(name, []).append(_Part(file.rank, file.name, where, tensor))
    is_flat = any(name.rpartition(".")[2].startswith("_flat_param") for name in parts)  # FSDP1's own parameters
    if is_flat or (len(files) > 1 and not any(_is_sharded(held[0].tensor) for held in parts.values())):
        raise CheckpointError(
            f"{path / files[0].name} and the files of the other ranks hold plain tensors that do not say which part of "
            "the model they are: FSDP's LOCAL_STATE_DICT, or a copy on each rank. Save a FULL_STATE_DICT or a "
            "SHARDED_STATE_DICT instead; of copies, give one file."
        )
    found = {name: _entry(path, name, held, len(files)) for name, held in parts.items()}
    tensors, aliases = without_copies(found)
    extras = added(extras, _extras_beside(path))
    return TensorIndex(path, NAME, tensors, aliases, world_size=len(files), extras=extras)


def _files(path: Path) -> list[_File]:
    matches = (_RANK.fullmatch(entry.name) for entry in path.iterdir() if has_file(path, entry.name))
    return [
        _File(match[0], match["stem"], int(match["world"]) if match["world"] else None, int(match["rank"]))
        for match in matches
        if match
    ]


def _is_extra(file: _File) -> bool:
    return _NO_WEIGHTS.search(file.name) is not None


def _model_files(path: Path) -> list[_File]:
    """The files with weights, one a rank, in the order of ranks."""
    files = sorted((file for file in _files(path) if not _is_extra(file)), key=lambda file: file.rank)
    stems, sizes = {file.stem for file in files}, {file.world_size for file in files}
    if len(stems) > 1:
        some = " and ".join(sorted(files[0].name for files in ([f for f in files if f.stem == s] for s in stems)))
        raise CheckpointError(f"{path} holds the rank files of several models, such as {some}; keep one.")
    if len(sizes) > 1:
        some = " and ".join(str(size or "an unknown number of") for size in sorted(sizes, key=lambda size: size or 0))
        raise CheckpointError(f"{path} mixes rank files of saves by {some} ranks; keep one save only.")
    world_size = next(iter(sizes)) or len(files)
    for rank in range(world_size):
        if rank >= len(files) or files[rank].rank > rank:
            raise CheckpointError(
                f"{path} has no file of rank {rank} beside {files[0].name}, but {world_size} ranks wrote it."
            )
        if files[rank].rank < rank:
            raise CheckpointError(f"{path / files[rank].name} is a second file of rank {files[rank].rank}.")
    if len(files) > world_size:
        raise CheckpointError(f"{path / files[-1].name} is of a rank that a save by {world_size} ranks does not have.")
    return files


def _is_sharded(tensor: AnyTensor) -> bool:
    return isinstance(tensor, (StoredDTensor, StoredShards))


def _entry(root: Path, name: str, parts: Sequence[_Part], num_files: int) -> TensorEntry:
    first = parts[0].tensor
    for part in parts:
        if type(part.tensor) is not type(first):
            raise CheckpointError(
                f"{part.where}: tensor {name} is a {type(part.tensor).__name__.removeprefix('Stored')} there, and "
                f"another kind of tensor in {parts[0].file}: these are files of different saves."
            )
    if isinstance(first, StoredDTensor):
        return _dtensor_entry(root, name, parts, num_files)
    if isinstance(first, StoredShards):
        return _shards_entry(root, name, parts)
    plain = readable(first, name, parts[0].where)
    assert isinstance(plain, StoredTensor)
    _refuse_differences(name, parts, [(part.tensor.dtype, part.tensor.shape) for part in parts])  # type: ignore[union-attr]  # all are of the first one's kind by now
    piece = piece_of(parts[0].file, plain, (0,) * len(plain.shape))
    return TensorEntry(name, plain.dtype, plain.shape, (piece,))


def _refuse_differences(name: str, parts: Sequence[_Part], descriptions: Sequence[tuple[object, ...]]) -> None:
    for part, found in zip(parts, descriptions, strict=True):
        if found != descriptions[0]:
            raise CheckpointError(
                f"{part.where}: tensor {name} is {_words(found)} there, but {_words(descriptions[0])} in "
                f"{parts[0].file}: these are files of different saves."
            )


def _words(description: tuple[object, ...]) -> str:
    return " ".join(str(list(item) if isinstance(item, tuple) else item)[:200] for item in description)


def _dtensor_entry(root: Path, name: str, parts: Sequence[_Part], num_files: int) -> TensorEntry:
    tensors = [part.tensor for part in parts if isinstance(part.tensor, StoredDTensor)]
    locals_ = [readable(tensor.local, name, part.where) for tensor, part in zip(tensors, parts, strict=True)]
    kinds = [
        (local.dtype, tensor.shape, "on a mesh of", tensor.mesh_shape, "as", tuple(map(str, tensor.placements)))
        for tensor, local in zip(tensors, locals_, strict=True)
    ]
    _refuse_differences(name, parts, kinds)
    here = {part.rank for part in parts}
    boxes: dict[object, Piece] = {}
    for part, tensor, local in zip(parts, tensors, locals_, strict=True):
        if absent := sorted(set(tensor.mesh_ranks) - here):
            beyond = f"which {num_files} files cannot be" if absent[0] >= num_files else "whose file does not hold it"
            raise CheckpointError(f"{part.where}: tensor {name} is sharded with rank {absent[0]}, {beyond}.")
        for piece in _dtensor_pieces(part, name, tensor, local):
            boxes.setdefault((piece.offsets, piece.shape), piece)
    return _of_boxes(root, name, locals_[0].dtype, tensors[0].shape, list(boxes.values()))


def _dtensor_pieces(part: _Part, name: str, tensor: StoredDTensor, local: StoredTensor) -> list[Piece]:
    coordinate = _coordinate(part, name, tensor)
    try:
        spans = local_spans(tensor.shape, tensor.mesh_shape, coordinate, tensor.placements)
    except ValueError as error:
        raise CheckpointError(f"{part.where}: tensor {name} cannot be put together: {error}.") from None
    shape = tuple(sum(stop - start for start, stop in ranges) for ranges in spans)
    if local.shape != shape:
        raise CheckpointError(
            f"{part.where}: tensor {name} has a part of shape {list(local.shape)}, but rank {part.rank} of its mesh "
            f"{list(tensor.mesh_shape)} should hold {list(shape)} of {list(tensor.shape)}."
        )
    return [piece_of(part.file, box_of(local, inner, box), offsets) for inner, (offsets, box) in local_boxes(spans)]


def _coordinate(part: _Part, name: str, tensor: StoredDTensor) -> tuple[int, ...]:
    """Where the rank stands on the tensor's mesh; the file must have been written there."""
    found: list[int] = []
    if part.rank in tensor.mesh_ranks:
        position = tensor.mesh_ranks.index(part.rank)
        for size in reversed(tensor.mesh_shape):
            position, index = divmod(position, size)
            found.insert(0, index)
    if len(found) != len(tensor.mesh_shape) or tensor.coordinate not in (None, tuple(found)):
        raise CheckpointError(
            f"{part.where} was written by another rank than its name says: tensor {name} is on the ranks "
            f"{list(tensor.mesh_ranks[:16])}, at {tensor.coordinate}; the files were renamed or mixed up."
        )
    return tuple(found)


def _shards_entry(root: Path, name: str, parts: Sequence[_Part]) -> TensorEntry:
    tensors = [part.tensor for part in parts if isinstance(part.tensor, StoredShards)]
    _refuse_differences(name, parts, [(tensor.dtype, tensor.shape, "in", tensor.boxes) for tensor in tensors])
    boxes: dict[Box, Piece] = {}
    for part, tensor in zip(parts, tensors, strict=True):
        for offsets, shard in tensor.shards:
            boxes.setdefault((offsets, shard.shape), piece_of(part.file, shard, offsets))
    lost = [offsets for offsets, size in tensors[0].boxes if (offsets, size) not in boxes and math.prod(size) > 0]
    if lost:
        raise CheckpointError(
            f"{root}: the shard of tensor {name} at {list(lost[0])} is in none of the {len(parts)} files: the "
            "file of a rank is missing."
        )
    return _of_boxes(root, name, tensors[0].dtype, tensors[0].shape, list(boxes.values()))


def _of_boxes(root: Path, name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> TensorEntry:
    """The entry, without empty pieces unless the tensor itself is empty."""
    filled = [piece for piece in pieces if math.prod(piece.shape)]
    return checked(root, name, dtype, shape, filled or pieces[:1])


def _extras_beside(path: Path) -> Mapping[str, Extra]:
    """The optimizer's and the trainer's rank files, which are read to be counted."""
    extras: dict[str, Extra] = {}
    for file in filter(_is_extra, _files(path)):
        where = member(path, file.name)
        kind = "optimizer" if _OPTIMIZER.search(file.name) else "other"
        try:
            found = extra_of([tensor for _, tensor in walk(read_torch_file(where), where)])
        except CheckpointError:  # what cannot be read here is no weight, and keeps no weight from being read
            found = Extra(0, where.stat().st_size)
        extras = added(extras, {kind: found})
    return extras
