"""Our own per-rank files, `shard-0000R-of-0000W.safetensors`: each holds a flat range of every tensor. No torch."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from pathlib import Path

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.index import Piece, TensorIndex, checked
from fsdp_shard.checkpoint.io.dtypes import TensorSpec, itemsize
from fsdp_shard.checkpoint.io.files import member
from fsdp_shard.checkpoint.io.safetensors_header import Header, read_header
from fsdp_shard.checkpoint.steps.file_plan import (
    Extent,
    ShardInfo,
    TargetPlan,
    WriteRequest,
    chunk_rows,
    parse_shard_info,
    parse_shard_name,
    plan_sharded,
    shard_name,
    stored_shape,
)
from fsdp_shard.errors import CheckpointError

NAME = "sharded"
KEEPS_NAMES = True  # they are the model's own, or an optimizer's for parameters of an adapter
LISTS_TIED_NAMES = False


def recognize(path: Path) -> bool:
    """A directory with at least one rank file."""
    return path.is_dir() and any(parse_shard_name(entry.name) for entry in path.iterdir())


def read(path: Path) -> TensorIndex:
    """The index over all ranks' files; each must be there, be of the same save, and together hold every tensor."""
    world_size = _world_size(path)
    pieces: dict[str, list[Piece]] = {}
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    aliases: dict[str, str] = {}
    first: ShardInfo | None = None
    for rank in range(world_size):
        file = shard_name(rank, world_size)
        where = member(path, file)
        header = read_header(where)
        info = parse_shard_info(header.metadata, where)
        first = first or info
        _check_same_save(where, rank, world_size, info, first)
        aliases.update(info.aliases)
        for name, (dtype, shape, held) in _rank_pieces(where, file, header, info).items():
            if specs.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise CheckpointError(
                    f"{where} says that tensor {name} is {dtype} {list(shape)}, but the file of an earlier rank says "
                    f"{specs[name][0]} {list(specs[name][1])}."
                )
            pieces.setdefault(name, []).extend(held)
    assert first is not None
    if not pieces:
        raise CheckpointError(f"{path} has the files of {world_size} ranks, but no tensors in them.")
    if lost := sorted(set(aliases.values()) - set(pieces)):
        raise CheckpointError(f"{path}: tensors are tied to {lost[0]}, but no rank's file holds that one.")
    tensors = {name: checked(path, name, *specs[name], held) for name, held in pieces.items()}
    return TensorIndex(path, NAME, tensors, aliases, {"save": first.save}, first.step, world_size)


def plan(specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
    """One file for each of `ranks` ranks, dim 0 of every tensor cut as FSDP2 cuts it."""
    ranks, save = request.ranks or 1, uuid.uuid4().hex
    parts = {spec.name: chunk_rows(spec, ranks) for spec in specs}
    extents: dict[str, list[Extent]] = {spec.name: [] for spec in specs}
    files = []
    for rank in range(ranks):
        pieces = [(spec, *parts[spec.name][rank]) for spec in specs]
        file = plan_sharded(pieces, rank, ranks, step=request.step, save=save, aliases=request.aliases)
        for spec, start, count in pieces:
            if count:
                size = itemsize(spec.dtype)
                place = file.tensors[spec.name]
                extents[spec.name].append(Extent(start * size, (start + count) * size, file.name, place))
        files.append(file)
    return TargetPlan(tuple(files), {name: tuple(held) for name, held in extents.items()}, {}, "sharded", ranks)


def _world_size(path: Path) -> int:
    found = {size for entry in path.iterdir() if (parsed := parse_shard_name(entry.name)) for size in parsed[1:]}
    if len(found) != 1:
        raise CheckpointError(
            f"{path} mixes rank files of saves by {' and '.join(map(str, sorted(found)))} ranks; keep one save only."
        )
    (world_size,) = found
    if not world_size:
        raise CheckpointError(f"{path} has rank files of a save by 0 ranks.")
    names = {entry.name for entry in path.iterdir() if parse_shard_name(entry.name)}
    missing = [shard_name(rank, world_size) for rank in range(world_size)[: len(names) + 1]]
    for name in missing:
        if name not in names:
            raise CheckpointError(f"{path / name} is missing: the checkpoint was written by {world_size} ranks.")
    return world_size


def _check_same_save(where: Path, rank: int, world_size: int, info: ShardInfo, first: ShardInfo) -> None:
    if (info.rank, info.world_size) != (rank, world_size):
        raise CheckpointError(
            f"{where} says inside that it is rank {info.rank} of {info.world_size}: it was renamed or mixed up."
        )
    if (info.step, info.save) != (first.step, first.save):
        raise CheckpointError(
            f"{where} is of another save than the file of rank 0 (step {info.step}, save {info.save!r}; rank 0: step "
            f"{first.step}, save {first.save!r}): weights of two saves are not mixed."
        )


def _rank_pieces(
    where: Path, file: str, header: Header, info: ShardInfo
) -> dict[str, tuple[str, tuple[int, ...], list[Piece]]]:
    """Tensor -> (dtype, full shape, pieces) of one file."""
    if set(header.tensors) != set(info.ranges):
        differing = sorted(set(header.tensors) ^ set(info.ranges))[0]
        raise CheckpointError(f"{where}: tensor {differing} stands only in one of header and fsdp_shard metadata.")
    found = {}
    for name, (shape, start) in info.ranges.items():
        stored = header.tensors[name]
        if name in info.offsets:  # whether it lies in the shape is checked with all other pieces
            found[name] = (stored.dtype, shape, [Piece(file, stored.start, info.offsets[name], stored.shape)])
            continue
        count, total = math.prod(stored.shape), math.prod(shape)
        if start + count > total or stored.shape != stored_shape(shape, start, count):
            raise CheckpointError(
                f"{where}: tensor {name} is stored with shape {list(stored.shape)} for flat element {start} on, "
                f"which is no part of the full shape {list(shape)}."
            )
        held, position = [], stored.start
        split = tensor_slices.flat_boxes(shape, start, count) or [((0,) * len(shape), shape)]
        for offsets, box in split:
            held.append(Piece(file, position, offsets, box))
            position += math.prod(box) * itemsize(stored.dtype)
        found[name] = (stored.dtype, shape, held)
    return found
