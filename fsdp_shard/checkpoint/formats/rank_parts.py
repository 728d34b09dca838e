"""Assembles tensors from the parts that ranks saved: DTensors, FSDP1's ShardedTensors, and plain copies.

Replicas must be equal (`Replicas`), and one of them is read. Each format defines where the parts come from.
"""

import math
import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.several_files import Agreement, Replicas
from fsdp_shard.checkpoint.io import member
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry, checked_entry
from fsdp_shard.checkpoint.tensor_slices import Box, flat_boxes
from fsdp_shard.checkpoint.torch_pickle import AnyTensor, StoredDTensor, StoredShards, piece_of, readable
from fsdp_shard.errors import CheckpointError

# Words in the names of files or parts of a state that hold no weights.
NO_WEIGHTS = re.compile(r"optim|extra|scheduler|scaler|rng|random|dataloader|sampler|trainer|zero_pp")
# A piece usually holds at least a few rows of a matrix. Only files of tiny models have more pieces for their size.
_FREE_PIECES, _BYTES_OF_A_PIECE = 100_000, 16


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor."""

    rank: int
    file: str
    path: Path
    tensor: AnyTensor


def assemble_parts(
    root: Path, parts: Mapping[str, Sequence[Part]], num_files: int
) -> tuple[dict[str, TensorEntry], dict[str, str], tuple[Piece, ...]]:
    """Return each tensor once, {alias: its name}, and the pieces that duplicate others.

    Args:
        root: The directory of the files.
        parts: The parts of each tensor by name, in rank order.
        num_files: The number of ranks that saved.

    Raises:
        CheckpointError: Parts are missing or from different saves, or replicas differ; the message names the file.
    """
    replicas = Replicas(root)
    found, num_pieces = {}, 0
    files = {part.path for held in parts.values() for part in held}
    most = _FREE_PIECES + sum(path.stat().st_size for path in files) // _BYTES_OF_A_PIECE
    for name, held in parts.items():
        found[name] = _entry(replicas, name, held, num_files)
        num_pieces += len(found[name].pieces)
        if num_pieces > most:
            raise CheckpointError(
                f"{root}: its tensors are in more than {most} pieces, too many for files of this size."
            )
    tensors, aliases = torch_pickle.without_copies(found, root)  # which rejects endless comparisons
    replicas.compare()
    return tensors, aliases, tuple(replicas.pieces)


def other_state(root: Path, file: str, kind: str) -> dict[str, Extra]:
    """Count the content of a file with a state other than weights, by kind."""
    path = member(root, file)
    try:
        state = torch_pickle.read_torch_file(path)
        return {kind: torch_pickle.extra_of([tensor for _, tensor in torch_pickle.walk(state, path)])}
    except CheckpointError:  # an unreadable file of another state does not prevent reading the weights
        return {kind: Extra(0, path.stat().st_size)}


def _entry(replicas: Replicas, name: str, parts: Sequence[Part], num_files: int) -> TensorEntry:
    root, first, saves = replicas.root, parts[0], Agreement()
    for part in parts:
        saves.check(f"tensor {name}", part.path, *_description(part, name))
    if not isinstance(first.tensor, (StoredDTensor, StoredShards)):
        entries = [torch_pickle.plain_entry(name, part.tensor, part.file, part.path) for part in parts]
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
    return checked_entry(root, name, dtype, first.tensor.shape, filled or list(boxes.values())[:1])


def _description(part: Part, name: str) -> tuple[object, ...]:
    """The properties on which the files of all ranks must agree."""
    tensor = part.tensor
    if isinstance(tensor, StoredDTensor):
        dtype, placements = readable(tensor.local, name, part.path).dtype, tuple(map(str, tensor.placements))
        return dtype, tensor.shape, "on a mesh of", tensor.mesh_shape, "as", placements
    if isinstance(tensor, StoredShards):
        return tensor.dtype, tensor.shape, "in", tensor.boxes
    plain = readable(tensor, name, part.path)
    return plain.dtype, plain.shape


def _pieces(part: Part, name: str, ranks: Set[int], num_files: int) -> list[Piece]:
    """The pieces in one rank's file; `ranks` are the ranks whose files hold the tensor."""
    tensor = part.tensor
    if isinstance(tensor, StoredShards):
        return [piece_of(part.file, shard, offsets) for offsets, shard in tensor.shards]
    assert isinstance(tensor, StoredDTensor), "the files of all ranks agree"
    if absent := sorted(set(tensor.mesh_ranks) - ranks):
        reason = f"which {num_files} files cannot be" if absent[0] >= num_files else "whose file does not hold it"
        raise CheckpointError(f"{part.path}: tensor {name} is sharded with rank {absent[0]}, {reason}.")
    local, coordinate = readable(tensor.local, name, part.path), _coordinate(part, name, tensor)
    try:
        spans = torch_pickle.local_spans(tensor.shape, tensor.mesh_shape, coordinate, tensor.placements)
    except ValueError as error:
        raise CheckpointError(f"{part.path}: tensor {name} cannot be put together: {error}.") from None
    shape = tuple(sum(stop - start for start, stop in ranges) for ranges in spans)
    if local.shape != shape:
        raise CheckpointError(
            f"{part.path}: tensor {name} has a part of shape {list(local.shape)}, but rank {part.rank} of its mesh "
            f"{list(tensor.mesh_shape)} should hold {list(shape)} of {list(tensor.shape)}."
        )
    return [
        piece_of(part.file, torch_pickle.box_of(local, inner, box), offsets)
        for inner, (offsets, box) in torch_pickle.local_boxes(spans)
    ]


def _coordinate(part: Part, name: str, tensor: StoredDTensor) -> tuple[int, ...]:
    """The rank's coordinate on the tensor's mesh, which must be that of the file's writer."""
    ranks, found = tensor.mesh_ranks, None
    if part.rank in ranks:
        ((found, _),) = flat_boxes(tensor.mesh_shape, ranks.index(part.rank), 1)
    if found is None or tensor.coordinate not in (None, found):
        raise CheckpointError(
            f"{part.path} was not written by rank {part.rank}: tensor {name} is on the ranks "
            f"{list(ranks[:16])}, at {tensor.coordinate}; the files were renamed or mixed up."
        )
    return found


def _check_boxes(root: Path, name: str, tensor: StoredShards, found: Container[Box], num_files: int) -> None:
    """Raise CheckpointError unless all ranks' shards, which a ShardedTensor lists, were found."""
    if lost := [box for box in tensor.boxes if box not in found and math.prod(box[1]) > 0]:
        raise CheckpointError(
            f"{root}: the shard of tensor {name} at {list(lost[0][0])} is in none of the {num_files} files: the "
            "file of a rank is missing."
        )
