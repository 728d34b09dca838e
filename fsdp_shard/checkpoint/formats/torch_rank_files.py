"""Format `torch_ranks`: one file of torch.save per rank, with DTensors (FSDP2, tensor parallelism) or ShardedTensors.

Known by `rank` and a number in the names (verl's `model_world_size_8_rank_0.pt`). Optimizer and trainer states next to
them count as extras. Replicas must be the same (`Replicas`); one is read. Imports no torch, runs no pickle.
"""

import math
import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.several_files import Agreement, Replicas, files_by_rank, one_world_size, sum_extras
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry, checked
from fsdp_shard.checkpoint.tensor_slices import Box, flat_boxes
from fsdp_shard.checkpoint.torch_pickle import AnyTensor, StoredDTensor, StoredShards, piece_of, readable
from fsdp_shard.errors import CheckpointError

NAME = "torch_ranks"

_RANK = re.compile(r"(?P<stem>.*?)(?:world_size_?(?P<world>\d+)_?)?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin|ckpt)")
_NO_WEIGHTS = re.compile(r"optim|extra|scheduler|scaler|rng|random|dataloader|sampler|trainer|zero_pp")
# A piece holds a few rows of a matrix, or more. Only files of tiny models have more pieces for their size.
_FREE_PIECES, _BYTES_OF_A_PIECE = 100_000, 16


@dataclass(frozen=True)
class _Part:
    """One rank's part of a tensor."""

    rank: int
    file: str
    where: Path
    tensor: AnyTensor


def recognize(path: Path) -> bool:
    """A directory with files of ranks that hold weights."""
    return path.is_dir() and any(torch_pickle.is_torch_file(path / file[0]) for file in _files(path))


def read(path: Path) -> TensorIndex:
    """The index of all ranks' files; each must exist, and together they must hold every tensor."""
    files = _model_files(path)
    parts: dict[str, list[_Part]] = {}
    extras: dict[str, Extra] = {}
    for rank, file in enumerate(files):
        where = member(path, file)
        weights, others = torch_pickle.weights_of(torch_pickle.read_torch_file(where), where)
        extras = sum_extras(extras, others)
        for name, tensor in weights.items():
            parts.setdefault(name, []).append(_Part(rank, file, where, tensor))
    is_flat = any(name.rpartition(".")[2].startswith("_flat_param") for name in parts)  # FSDP1's own parameters
    is_sharded = any(isinstance(held[0].tensor, (StoredDTensor, StoredShards)) for held in parts.values())
    if is_flat or (len(files) > 1 and not is_sharded):
        raise CheckpointError(
            f"{path / files[0]} and the files of the other ranks hold plain tensors that do not say which part of "
            "the model they are: FSDP's LOCAL_STATE_DICT, or a copy on each rank. Save a FULL_STATE_DICT or a "
            "SHARDED_STATE_DICT instead; of copies, give one file."
        )
    replicas = Replicas(path)
    found, num_pieces = {}, 0
    most = _FREE_PIECES + sum((path / file).stat().st_size for file in files) // _BYTES_OF_A_PIECE
    for name, in_files in parts.items():
        found[name] = _entry(replicas, name, in_files, len(files))
        num_pieces += len(found[name].pieces)
        if num_pieces > most:
            raise CheckpointError(
                f"{path}: its tensors are in more than {most} pieces, too many for files of this size."
            )
    tensors, aliases = torch_pickle.without_copies(found, path)
    extras = sum_extras(extras, _other_states(path))
    replicas.compare()
    pieces = tuple(replicas.pieces)
    return TensorIndex(path, NAME, tensors, aliases, world_size=len(files), extras=extras, replicas=pieces)


def _files(path: Path, is_extra: bool = False) -> list[re.Match[str]]:
    """The names of rank files with weights, or of those with other states."""
    names = [entry.name for entry in path.iterdir() if bool(_NO_WEIGHTS.search(entry.name)) == is_extra]
    return [match for name in names if (match := _RANK.fullmatch(name)) and has_file(path, name)]


def _model_files(path: Path) -> list[str]:
    """The files with weights, one per rank, in the order of ranks."""
    files = _files(path)
    models = {file["stem"]: file[0] for file in files}
    if len(models) > 1:
        some = " and ".join(sorted(models.values()))
        raise CheckpointError(f"{path} holds the rank files of several models, such as {some}; keep one.")
    world_size = one_world_size(path, {int(file["world"]) if file["world"] else None for file in files})
    return files_by_rank(path, [(int(file["rank"]), file[0]) for file in files], world_size)


def _entry(replicas: Replicas, name: str, parts: Sequence[_Part], num_files: int) -> TensorEntry:
    root, first, saves = replicas.root, parts[0], Agreement()
    for part in parts:
        saves.check(f"tensor {name}", part.where, *_description(part, name))
    if not isinstance(first.tensor, (StoredDTensor, StoredShards)):
        entries = [torch_pickle.plain_entry(name, part.tensor, part.file, part.where) for part in parts]
        for entry in entries:
            replicas.add(name, entry.dtype, entry.pieces[0])
        return entries[0]
    ranks = {part.rank for part in parts}
    dtype = str(_description(first, name)[0])
    boxes: dict[Box, Piece] = {}
    for part in parts:
        for piece in _pieces(part, name, ranks, num_files):
            boxes.setdefault((piece.offsets, piece.shape), piece)
            replicas.add(name, dtype, piece)
    if isinstance(first.tensor, StoredShards):
        _check_boxes(root, name, first.tensor, boxes, len(parts))
    filled = [piece for piece in boxes.values() if math.prod(piece.shape)]
    return checked(root, name, dtype, first.tensor.shape, filled or list(boxes.values())[:1])


def _description(part: _Part, name: str) -> tuple[object, ...]:
    """What the files of all ranks must agree on."""
    tensor = part.tensor
    if isinstance(tensor, StoredDTensor):
        dtype, placements = readable(tensor.local, name, part.where).dtype, tuple(map(str, tensor.placements))
        return dtype, tensor.shape, "on a mesh of", tensor.mesh_shape, "as", placements
    if isinstance(tensor, StoredShards):
        return tensor.dtype, tensor.shape, "in", tensor.boxes
    plain = readable(tensor, name, part.where)
    return plain.dtype, plain.shape


def _pieces(part: _Part, name: str, ranks: Set[int], num_files: int) -> list[Piece]:
    """The pieces in one rank's file; `ranks` are those whose files hold the tensor."""
    tensor = part.tensor
    if isinstance(tensor, StoredShards):
        return [piece_of(part.file, shard, offsets) for offsets, shard in tensor.shards]
    assert isinstance(tensor, StoredDTensor), "the files of all ranks agree"
    if absent := sorted(set(tensor.mesh_ranks) - ranks):
        reason = f"which {num_files} files cannot be" if absent[0] >= num_files else "whose file does not hold it"
        raise CheckpointError(f"{part.where}: tensor {name} is sharded with rank {absent[0]}, {reason}.")
    local, coordinate = readable(tensor.local, name, part.where), _coordinate(part, name, tensor)
    try:
        spans = torch_pickle.local_spans(tensor.shape, tensor.mesh_shape, coordinate, tensor.placements)
    except ValueError as error:
        raise CheckpointError(f"{part.where}: tensor {name} cannot be put together: {error}.") from None
    shape = tuple(sum(stop - start for start, stop in ranges) for ranges in spans)
    if local.shape != shape:
        raise CheckpointError(
            f"{part.where}: tensor {name} has a part of shape {list(local.shape)}, but rank {part.rank} of its mesh "
            f"{list(tensor.mesh_shape)} should hold {list(shape)} of {list(tensor.shape)}."
        )
    return [
        piece_of(part.file, torch_pickle.box_of(local, inner, box), offsets)
        for inner, (offsets, box) in torch_pickle.local_boxes(spans)
    ]


def _coordinate(part: _Part, name: str, tensor: StoredDTensor) -> tuple[int, ...]:
    """The coordinate of the rank on the tensor's mesh, which must be that of the writer of the file."""
    ranks, found = tensor.mesh_ranks, None
    if part.rank in ranks:
        ((found, _),) = flat_boxes(tensor.mesh_shape, ranks.index(part.rank), 1)
    if found is None or tensor.coordinate not in (None, found):
        raise CheckpointError(
            f"{part.where} was not written by rank {part.rank}: tensor {name} is on the ranks "
            f"{list(ranks[:16])}, at {tensor.coordinate}; the files were renamed or mixed up."
        )
    return found


def _check_boxes(root: Path, name: str, tensor: StoredShards, found: Container[Box], num_files: int) -> None:
    """CheckpointError unless the shards of all ranks were found, which a ShardedTensor lists."""
    if lost := [box for box in tensor.boxes if box not in found and math.prod(box[1]) > 0]:
        raise CheckpointError(
            f"{root}: the shard of tensor {name} at {list(lost[0][0])} is in none of the {num_files} files: the "
            "file of a rank is missing."
        )


def _other_states(path: Path) -> Mapping[str, Extra]:
    """The optimizer's and the trainer's rank files, which are read to be counted."""
    extras: dict[str, Extra] = {}
    for file in _files(path, is_extra=True):
        where = member(path, file[0])
        kind = "optimizer" if "optim" in file[0] else "other"
        try:
            state = torch_pickle.read_torch_file(where)
            found = torch_pickle.extra_of([tensor for _, tensor in torch_pickle.walk(state, where)])
        except CheckpointError:  # an unreadable file of another state does not prevent reading the weights
            found = Extra(0, where.stat().st_size)
        extras = sum_extras(extras, {kind: found})
    return extras
