"""Plans the files of a checkpoint: all headers and byte offsets, before the first byte is written.

*Gathered* is a plain Hugging Face directory; *sharded* is one file per rank. Writers (a saving rank, `convert`) only
write bytes at the offsets of a plan.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.io import PAGE_BYTES, PAGED_BYTES, TensorSpec, build_header, itemsize
from fsdp_shard.checkpoint.tensor_slices import Box
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import parse_json

SHARD_FORMAT_VERSION = 1
SHARD_KEY = "fsdp_shard"  # our entry in the __metadata__ of a rank file
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DCP_METADATA = ".metadata"


@dataclass(frozen=True)
class FilePlan:
    """One file: its name, the absolute offset of each tensor, its final size, and all bytes outside of tensors.

    `frames` are (byte position, bytes) in file order; for a safetensors file, only the header.
    """

    name: str
    frames: tuple[tuple[int, bytes], ...]
    tensors: dict[str, int]
    num_bytes: int

    @property
    def header(self) -> bytes:
        """All bytes outside of tensors, in file order; the manifest's `header_digest` covers them."""
        return b"".join(data for _, data in self.frames)


@dataclass(frozen=True, slots=True)
class Extent:
    """The destination of the flat bytes [start, stop) of a tensor: file name and absolute offset."""

    start: int
    stop: int
    file: str
    offset: int


@dataclass(frozen=True)
class WriteRequest:
    """The options of a writer; each format uses those that apply, and `ConvertSettings.check` rejects the others.

    `ranks` is None if the user gave no number. `nest` holds the keys under which tensors are nested (`app.model`).
    `source_offsets` holds the offset in the source file of each tensor that is copied unchanged (see `build_header`).
    `metadata` holds entries for the headers of format=huggingface.
    """

    max_shard_bytes: int | None
    ranks: int | None
    step: int | None
    aliases: Mapping[str, str]
    nest: str | None = None
    source_offsets: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetPlan:
    """The output of a format: files, the extents that partition each tensor in flat order, and small files by name."""

    files: tuple[FilePlan, ...]
    extents: Mapping[str, tuple[Extent, ...]]
    small_files: Mapping[str, bytes]
    layout: str
    world_size: int

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(plan.num_bytes for plan in self.files) + sum(map(len, self.small_files.values()))


def plan_gathered(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int | None,
    aliases: Mapping[str, str] | None = None,
    single_file: str = SINGLE_FILE,
    source_offsets: Mapping[str, int] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[list[FilePlan], bytes | None]:
    """Plan the files of a Hugging Face directory.

    Args:
        specs: The tensors, which keep their order and are never split.
        max_shard_bytes: Maximum file size, including the header; only a file with a single tensor may exceed it. None
            for one file.
        aliases: {tied name: kept name}, for the metadata, as safetensors' `save_model` writes them.
        single_file: Name of the file if there is only one.
        source_offsets: See `WriteRequest`.
        metadata: More entries for the header of each file.

    Returns:
        The files, and the content of `model.safetensors.index.json` if there are several.
    """
    groups = _split(specs, max_shard_bytes)
    plans = []
    for number, group in enumerate(groups, start=1):
        name = single_file if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        kept = {spec.name for spec in group}
        tied = {alias: target for alias, target in (aliases or {}).items() if target in kept}
        plans.append(_plan_file(name, group, {**(metadata or {}), "format": "pt", **tied}, source_offsets or {}))
    if len(plans) == 1:
        return plans, None
    weight_map = {name: plan.name for plan in plans for name in plan.tensors}
    total = sum(spec.num_bytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return plans, (json.dumps(index, indent=2) + "\n").encode()


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int | None) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    padding = PAGE_BYTES if max_shard_bytes is not None and max_shard_bytes >= PAGED_BYTES else 0
    used = padding
    for spec in specs:
        size = spec.num_bytes + _entry_bytes(spec)
        if groups[-1] and max_shard_bytes is not None and used + size > max_shard_bytes:
            groups.append([])
            used = padding
        groups[-1].append(spec)
        used += size
    return groups


def _entry_bytes(spec: TensorSpec) -> int:
    """An upper bound for the bytes of a tensor's header entry."""
    # 22: a dimension of 20 digits and its separator; 96: the keys, the dtype and two offsets.
    return len(json.dumps(spec.name, ensure_ascii=False).encode()) + 22 * len(spec.shape) + 96


def _plan_file(
    name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str], source_offsets: Mapping[str, int]
) -> FilePlan:
    # Placing wide types first aligns every tensor to its element size; otherwise, the order is kept.
    ordered = sorted(specs, key=lambda spec: -itemsize(spec.dtype))
    page_offset = source_offsets.get(ordered[0].name, 0) if ordered else 0
    header, offsets = build_header(ordered, metadata, page_offset)
    end = offsets[ordered[-1].name] + ordered[-1].num_bytes if ordered else len(header)
    return FilePlan(name, ((0, header),), offsets, end)


def plan_sharded(
    pieces: Sequence[tuple[TensorSpec, int, int]],
    rank: int,
    world_size: int,
    *,
    step: int | None,
    save_id: str,
    aliases: Mapping[str, str],
    boxes: Mapping[str, Box] | None = None,
) -> FilePlan:
    """Plan the file of one rank.

    A range of complete rows is stored with shape [rows, ...], any other range with one dimension. Empty ranges are not
    stored, except that rank 0 stores tensors without elements.

    Args:
        pieces: (tensor, first flat element, number of elements), one for each tensor.
        rank: The rank.
        world_size: Number of ranks.
        step: The training step.
        save_id: Text that is equal in all files of one save and differs between saves: readers reject a mix.
        aliases: {tied name: kept name}.
        boxes: The pieces that are boxes instead of flat ranges, by tensor.
    """
    specs: list[TensorSpec] = []
    ranges: dict[str, dict[str, Any]] = {}
    for spec, start, count in pieces:
        if not count and (spec.num_elements or rank):
            continue
        box = (boxes or {}).get(spec.name)
        held = stored_shape(spec.shape, start, count) if box is None else box[1]
        specs.append(TensorSpec(spec.name, spec.dtype, held))
        ranges[spec.name] = range_entry(spec.shape, start, None if box is None else box[0])
    document = shard_document(rank, world_size, step, save_id, aliases, ranges)
    metadata = {"format": "pt", SHARD_KEY: json.dumps(document, separators=(",", ":"), ensure_ascii=False)}
    # Within each dtype, by which `_plan_file` sorts, tensors of complete pages come first: those of the widest dtype
    # begin at a page boundary, and the parts of all ranks can be mapped.
    specs.sort(key=lambda spec: spec.num_bytes % PAGE_BYTES != 0)
    return _plan_file(shard_name(rank, world_size), specs, metadata, {})


def shard_document(
    rank: int, world_size: int, step: int | None, save_id: str, aliases: Mapping[str, str], ranges: Mapping[str, Any]
) -> dict[str, Any]:
    """Our entry in the metadata of a rank file, with the `range_entry` of each of its tensors."""
    return {
        "format_version": SHARD_FORMAT_VERSION,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "save": save_id,
        "aliases": dict(aliases),
        "tensors": ranges,
    }


def range_entry(shape: Sequence[int], start: int, offsets: Sequence[int] | None = None) -> dict[str, Any]:
    """The entry of a tensor in `shard_document`: full shape, first flat element in the file, offsets of a box."""
    entry: dict[str, Any] = {"shape": list(shape), "start": start}
    return entry if offsets is None else {**entry, "offsets": list(offsets)}


def stored_shape(shape: tuple[int, ...], start: int, count: int) -> tuple[int, ...]:
    """The shape under which the flat range [start, start + count) of a tensor is stored in a rank file."""
    if not shape:
        return ()
    row = math.prod(shape[1:])
    if not row or (start % row == 0 and count % row == 0):
        return (count // row if row else shape[0], *shape[1:])
    return (count,)


def chunk_rows(spec: TensorSpec, ranks: int) -> list[tuple[int, int]]:
    """(first flat element, number of elements) for each rank, splitting dim 0 like `torch.chunk` (and FSDP2).

    The last ranks may receive less or nothing. A scalar goes to rank 0.
    """
    rows = spec.shape[0] if spec.shape else 1
    row, per_rank = math.prod(spec.shape[1:]), -(-rows // ranks)
    edges = [min(rank * per_rank, rows) * row for rank in range(ranks + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


def shard_name(rank: int, world_size: int) -> str:
    """The name of a rank file."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """(rank, world size) of a rank file's name, or None for any other name."""
    match = re.fullmatch(r"shard-(\d{5,})-of-(\d{5,})\.safetensors", name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class ShardInfo:
    """Our entry in the metadata of a rank file; `ranges` maps a tensor to (full shape, first flat element).

    `offsets` holds the offsets of box tensors, which have their stored shape.
    """

    rank: int
    world_size: int
    step: int | None
    save_id: str
    aliases: dict[str, str]
    ranges: dict[str, tuple[tuple[int, ...], int]]
    offsets: dict[str, tuple[int, ...]]


def parse_shard_info(metadata: Mapping[str, str], path: Path) -> ShardInfo:
    """Parse the `shard_document` in the header of `path`; raise CheckpointError if it is wrong in any way."""
    if SHARD_KEY not in metadata:
        raise CheckpointError(f"{path} has no {SHARD_KEY} entry in its metadata: it was not written by fsdp-shard.")
    where = f"the {SHARD_KEY} metadata of {path}"
    document = parse_json(metadata[SHARD_KEY].encode(), where)
    if not isinstance(document, dict) or document.get("format_version") != SHARD_FORMAT_VERSION:
        found = document.get("format_version") if isinstance(document, dict) else None
        raise CheckpointError(f"{where} has format version {found!r}; this fsdp-shard reads {SHARD_FORMAT_VERSION}.")
    try:
        tensors = document["tensors"].items()
        return ShardInfo(
            rank=_count(document["rank"]),
            world_size=_count(document["world_size"]),
            step=None if document["step"] is None else _count(document["step"]),
            save_id=_text(document["save"]),
            aliases={_text(alias): _text(kept) for alias, kept in document["aliases"].items()},
            ranges={name: (tuple(map(_count, item["shape"])), _count(item["start"])) for name, item in tensors},
            offsets={name: tuple(map(_count, item["offsets"])) for name, item in tensors if "offsets" in item},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is not what fsdp-shard writes: {error!r}.") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
