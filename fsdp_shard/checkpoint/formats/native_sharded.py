"""Format `sharded`: one `shard-0000R-of-0000W.safetensors` per rank with a flat range of each tensor, and their index.

Checkpoints of earlier versions have no index.
"""

import dataclasses
import math
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.formats.several_files import Agreement, files_by_rank, one_world_size, plan_ranks
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import Header, TensorSpec, has_file, itemsize, member, read_header
from fsdp_shard.checkpoint.steps import file_plan
from fsdp_shard.checkpoint.steps.file_plan import FilePlan, ShardInfo, TargetPlan, WriteRequest, parse_shard_name
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, RankFileSummary, build_shard_index, read_shard_index
from fsdp_shard.checkpoint.tensor_entry import Piece, checked_entry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count

NAME = "sharded"
KEEPS_NAMES = True  # the model's own names, or an optimizer's for parameters of an adapter
LISTS_TIED_NAMES = False


def recognize(path: Path) -> bool:
    """Return whether `path` is a directory with at least one rank file."""
    return path.is_dir() and any(parse_shard_name(entry.name) for entry in path.iterdir())


def read(path: Path) -> TensorIndex:
    """Return the index of all ranks' files, which must exist: from the index file if there is one, or from headers."""
    if not has_file(path, SHARD_INDEX):
        return read_headers(path)
    files, found = _files(path), read_shard_index(path)
    if found.world_size != len(files):
        raise CheckpointError(
            f"{path / SHARD_INDEX} is of a save by {format_count(found.world_size, 'rank')}, but there are files of "
            f"{len(files)}: these are files of different saves."
        )
    if not found.tensors:
        raise _no_tensors(path)
    index = TensorIndex(path, NAME, found.tensors, found.aliases, {"save": found.save_id}, found.step, len(files))
    return dataclasses.replace(index, headers=found.headers)


def read_headers(path: Path) -> TensorIndex:
    """Return the index from the headers of all rank files, which must be of one save and hold every tensor."""
    files = _files(path)
    pieces: dict[str, list[Piece]] = {}
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    aliases: dict[str, str] = {}
    saves = Agreement()
    for rank, file in enumerate(files):
        where = member(path, file)
        header = read_header(where)
        info = file_plan.parse_shard_info(header.metadata, where)
        if (info.rank, info.world_size) != (rank, len(files)):
            raise CheckpointError(
                f"{where} has the header of rank {info.rank} of {info.world_size}: it was renamed or mixed up."
            )
        saves.check("the save", where, info.save_id, "at step", info.step)
        saves.check("the list of tied tensors", where, dict(info.aliases))
        aliases.update(info.aliases)
        for name, dtype, shape, held in _rank_pieces(where, file, header, info):
            saves.check(f"tensor {name}", where, dtype, shape)
            specs[name] = dtype, shape
            pieces.setdefault(name, []).extend(held)
    if not pieces:
        raise _no_tensors(path)
    if lost := sorted(set(aliases.values()) - set(pieces)):
        raise CheckpointError(f"{path}: tensors are tied to {lost[0]}, but no rank's file holds that one.")
    tensors = {name: checked_entry(path, name, *specs[name], held) for name, held in pieces.items()}
    return TensorIndex(path, NAME, tensors, aliases, {"save": info.save_id}, info.step, len(files))


def plan(specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
    """Plan one file per rank (`request.ranks`, one by default), dim 0 of each tensor chunked as by FSDP2."""
    ranks, save_id = request.ranks or 1, uuid.uuid4().hex
    reports = []

    def plan_file(rank: int, pieces: Sequence[tuple[TensorSpec, int, int]]) -> FilePlan:
        file = file_plan.plan_sharded(pieces, rank, ranks, step=request.step, save_id=save_id, aliases=request.aliases)
        reports.append(RankFileSummary.of(file, pieces))
        return file

    files, extents = plan_ranks(specs, ranks, plan_file)
    index = build_shard_index(reports, request.step, save_id, request.aliases)
    return TargetPlan(files, extents, {SHARD_INDEX: index}, "sharded", ranks)


def _no_tensors(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has the files of all ranks, but no tensors in them.")


def _files(path: Path) -> list[str]:
    """Return the names of the rank files in the order of ranks."""
    found = {entry.name: parsed for entry in path.iterdir() if (parsed := parse_shard_name(entry.name))}
    if not found:
        raise CheckpointError(f"{path} has no rank file, though its {SHARD_INDEX} lists some: they are missing.")
    world_size = one_world_size(path, {size for _, size in found.values()})
    if not world_size:
        raise CheckpointError(f"{path} has rank files of a save by 0 ranks.")
    return files_by_rank(path, [(rank, name) for name, (rank, _) in found.items()], world_size)


def _rank_pieces(
    where: Path, file: str, header: Header, info: ShardInfo
) -> Iterator[tuple[str, str, tuple[int, ...], list[Piece]]]:
    """Yield (name, dtype, full shape, pieces) of each tensor of one file."""
    if differing := sorted(set(header.tensors) ^ set(info.ranges)):
        raise CheckpointError(f"{where}: tensor {differing[0]} is only in one of header and fsdp_shard metadata.")
    for name, (shape, start) in info.ranges.items():
        stored = header.tensors[name]
        if name in info.offsets:  # later checked against the shape, with all other pieces
            yield name, stored.dtype, shape, [Piece(file, stored.start, info.offsets[name], stored.shape)]
            continue
        count, total = math.prod(stored.shape), math.prod(shape)
        if start + count > total or stored.shape != file_plan.stored_shape(shape, start, count):
            raise CheckpointError(
                f"{where}: tensor {name} is stored with shape {list(stored.shape)} for flat element {start} on, "
                f"which is not a part of the full shape {list(shape)}."
            )
        held, position = [], stored.start
        for offsets, box in tensor_slices.flat_boxes(shape, start, count) or [((0,) * len(shape), shape)]:
            held.append(Piece(file, position, offsets, box))
            position += math.prod(box) * itemsize(stored.dtype)
        yield name, stored.dtype, shape, held
