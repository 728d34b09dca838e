"""Plans a directory of `torch.distributed.checkpoint`: `.metadata` and one `__RANK_0.distcp` file per rank. Pure.

Source: `torch.distributed.checkpoint.filesystem` and `.metadata`, whose classes are named in the pickle, not imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_shard.checkpoint.formats.several_files import plan_ranks
from fsdp_shard.checkpoint.io import TensorSpec, itemsize, torch_name
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA, FilePlan, TargetPlan, WriteRequest
from fsdp_shard.checkpoint.tensor_slices import flat_boxes
from fsdp_shard.checkpoint.torch_pickle import Call, Global, Instance, Items, dumps, frame

LISTS_TIED_NAMES = True

_MODULE = "torch.distributed.checkpoint.metadata"
_ALIGNMENT = 64  # torch's alignment of storages in an item; used for items, too, so that tensors can be memory-mapped
_CONTIGUOUS = 0  # _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of rows of a tensor, and the bytes of its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def plan(specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
    """Plan one `.distcp` file per rank (`request.ranks`, one by default), dim 0 of each tensor chunked as by FSDP2.

    A tied name is listed with the bytes of its tensor, so that a state dict with both names loads.
    """
    ranks = request.ranks or 1
    chunks: dict[str, list[_Chunk]] = {spec.name: [] for spec in specs}

    def plan_file(rank: int, pieces: Sequence[tuple[TensorSpec, int, int]]) -> FilePlan:
        held = [piece for piece in pieces if piece[2] or (rank == 0 and not piece[0].num_elements)]
        return _plan_file(f"__{rank}_0.distcp", held, chunks)

    files, extents = plan_ranks(specs, ranks, plan_file)
    metadata = _metadata(specs, chunks, request.aliases, request.nest)
    layout = "sharded" if ranks > 1 else "gathered"
    return TargetPlan(files, extents, {DCP_METADATA: dumps(metadata)}, layout, ranks)


def _plan_file(
    name: str, pieces: Sequence[tuple[TensorSpec, int, int]], chunks: Mapping[str, list[_Chunk]]
) -> FilePlan:
    """Plan the file of one rank; its chunks are appended to those of earlier ranks."""
    frames: list[tuple[int, bytes]] = []
    starts, position, gap = {}, 0, b""
    for spec, first, count in pieces:
        ((offsets, sizes),) = flat_boxes(spec.shape, first, count) or [((0,) * len(spec.shape), spec.shape)]
        before, after = frame(TensorSpec(spec.name, spec.dtype, sizes))
        item_start = position + len(gap)
        start = item_start + len(before)
        stop = start + count * itemsize(spec.dtype)
        end = stop + len(after)
        frames += [(position, gap + before), (stop, after)]
        chunks[spec.name].append(_Chunk(offsets, sizes, name, item_start, end - item_start))
        starts[spec.name], position, gap = start, end, bytes(-end % _ALIGNMENT)
    return FilePlan(name, tuple(frames), starts, position)


def _metadata(
    specs: Sequence[TensorSpec], chunks: Mapping[str, Sequence[_Chunk]], aliases: Mapping[str, str], nest: str | None
) -> Instance:
    """Return the `Metadata` object that `dcp.load` reads."""
    by_name = {spec.name: spec for spec in specs}
    stored = {name: name for name in by_name} | dict(aliases)
    outer = tuple(nest.split(".")) if nest else ()
    keys = {name: ".".join((*outer, name)) for name in stored}
    storage = [
        (_index(keys[name], chunk, number), _storage(chunk))
        for name, target in stored.items()
        for number, chunk in enumerate(chunks[target])
    ]
    state = {
        "state_dict_metadata": {keys[name]: _tensor(by_name[kept], chunks[kept]) for name, kept in stored.items()},
        "planner_data": {keys[name]: (*outer, name) for name in stored},
        "storage_data": Items(tuple(storage)),
        "storage_meta": None,
        "version": "1.0.0",
    }
    return Instance(Global(_MODULE, "Metadata"), state)


def _tensor(spec: TensorSpec, chunks: Sequence[_Chunk]) -> Instance:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,))
    properties = (Global("torch", torch_name(spec.dtype)), layout, False, memory_format, False)
    boxes = [{"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)} for chunk in chunks]
    state = {
        "properties": Instance(Global(_MODULE, "TensorProperties"), properties),
        "size": _size(spec.shape),
        "chunks": [Instance(Global(_MODULE, "ChunkStorageMetadata"), box) for box in boxes],
    }
    return Instance(Global(_MODULE, "TensorStorageMetadata"), state)


def _index(key: str, chunk: _Chunk, number: int) -> Instance:
    state = {"fqn": key, "offset": _size(chunk.offsets), "index": number}
    return Instance(Global(_MODULE, "MetadataIndex"), state)


def _storage(chunk: _Chunk) -> Instance:
    state = {"relative_path": chunk.file, "offset": chunk.start, "length": chunk.num_bytes}
    return Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (shape,))
