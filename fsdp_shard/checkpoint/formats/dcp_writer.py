"""Plans a `torch.distributed.checkpoint` directory: `.metadata` and `__RANK_0.distcp` files of saved tensors. Pure.

Source: `torch.distributed.checkpoint.filesystem` and `.metadata`, whose objects are named here and not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_shard.checkpoint.io.dtypes import TensorSpec, itemsize, row_elements, torch_name
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA, Extent, FilePlan, TargetPlan, WriteRequest, chunk_rows
from fsdp_shard.checkpoint.torch_pickle.pickler import Call, Global, Instance, Items, dumps
from fsdp_shard.checkpoint.torch_pickle.torch_zip_writer import frame

_MODULE = "torch.distributed.checkpoint.metadata"
_ALIGNMENT = 64  # torch's for storages inside an item; kept for the items, so that tensors can be mapped
_CONTIGUOUS = 0  # _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of rows of a tensor, and where its item lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def plan_dcp(specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
    """One `.distcp` file for each of `ranks` ranks (one by default), dim 0 of every tensor cut as FSDP2 cuts it.

    A tied name is listed with the place of the tensor that it is tied to, so that a state dict with both loads.
    """
    ranks = request.ranks or 1
    parts = {spec.name: chunk_rows(spec, ranks) for spec in specs}
    chunks: dict[str, list[_Chunk]] = {spec.name: [] for spec in specs}
    extents: dict[str, list[Extent]] = {spec.name: [] for spec in specs}
    files = []
    for rank in range(ranks):
        pieces = [(spec, *parts[spec.name][rank]) for spec in specs]
        held = [piece for piece in pieces if piece[2] or (rank == 0 and not piece[0].num_elements)]
        files.append(_plan_file(f"__{rank}_0.distcp", held, chunks, extents))
    metadata = _metadata(specs, chunks, request.aliases, request.nest)
    return TargetPlan(
        tuple(files),
        {name: tuple(held) for name, held in extents.items()},
        {DCP_METADATA: dumps(metadata)},
        "sharded" if ranks > 1 else "gathered",
        ranks,
    )


def _plan_file(
    name: str,
    pieces: Sequence[tuple[TensorSpec, int, int]],
    chunks: Mapping[str, list[_Chunk]],
    extents: Mapping[str, list[Extent]],
) -> FilePlan:
    """The file of one rank; its chunks and extents are added to those of the ranks before it."""
    frames: list[tuple[int, bytes]] = []
    places, position, gap = {}, 0, b""
    for spec, start, count in pieces:
        offsets, sizes = _rows(spec, start, count)
        item = frame(TensorSpec(spec.name, spec.dtype, sizes))
        size = itemsize(spec.dtype)
        place = position + len(gap) + len(item.before)
        end = place + count * size + len(item.after)
        frames += [(position, gap + item.before), (place + count * size, item.after)]
        chunks[spec.name].append(_Chunk(offsets, sizes, name, position + len(gap), end - position - len(gap)))
        if count:
            extents[spec.name].append(Extent(start * size, (start + count) * size, name, place))
        places[spec.name], position, gap = place, end, bytes(-end % _ALIGNMENT)
    return FilePlan(name, tuple(frames), places, position)


def _rows(spec: TensorSpec, start: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of a flat range of whole rows."""
    if not spec.shape:
        return (), ()
    row = row_elements(spec.shape)
    first, rows = (start // row, count // row) if row else (0, spec.shape[0])
    return (first, *[0] * (len(spec.shape) - 1)), (rows, *spec.shape[1:])


def _metadata(
    specs: Sequence[TensorSpec], chunks: Mapping[str, Sequence[_Chunk]], aliases: Mapping[str, str], nest: str | None
) -> Instance:
    """The `Metadata` object that `dcp.load` reads."""
    by_name = {spec.name: spec for spec in specs}
    stored = {name: name for name in by_name} | dict(aliases)
    keys = {name: f"{nest}.{name}" if nest else name for name in stored}
    storage = [
        (_index(keys[name], chunk, number), _storage(chunk))
        for name, target in stored.items()
        for number, chunk in enumerate(chunks[target])
    ]
    state = {
        "state_dict_metadata": {keys[name]: _tensor(by_name[kept], chunks[kept]) for name, kept in stored.items()},
        "planner_data": {keys[name]: (nest, name) if nest else (name,) for name in stored},
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
