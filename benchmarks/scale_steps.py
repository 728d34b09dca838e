"""Steps of many ranks that `scale.py` measures with: of the shapes of real models, with holes or zeros for data.

A *sparse* step has every byte of a real one but for its data, which are holes. In a *thin* one, all tensors have fewer
columns by `BYTES`, and the chunks of the digests are smaller by as much: so it has as many tensors, pieces, files and
chunks as the real one, each chunk in as many files, and real digests, but a fraction of the bytes.
"""

from __future__ import annotations

import importlib
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "70B": (
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "405B": (
        "LlamaConfig",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "671B": ("DeepseekV3Config", {}),
}
BYTES = 512  # of a real step for each one of a thin step
CHUNK_BYTES = 1 << 20  # of the digests
SLOTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for each parameter

Shape = tuple[int, ...]


def config_of(model: str) -> Any:
    """The config of transformers."""
    import transformers

    name, values = CONFIGS[model]
    return getattr(transformers, name)(**values)


def shapes_of(model: str, work: Path) -> dict[str, Shape]:
    """The parameters of a model by name; kept in a file, so that measurements import no transformers."""
    file = work / f"{model}.json"
    if not file.exists():
        import torch
        import transformers

        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(config_of(model))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({key: list(value.shape) for key, value in built.named_parameters()}))
    return {name: tuple(shape) for name, shape in json.loads(file.read_text()).items()}


def thin_shapes_of(model: str, work: Path) -> dict[str, Shape]:
    """The same with a few columns; vectors are as they are."""
    return {
        name: (shape[0], max(math.prod(shape[1:]) // BYTES, 1)) if len(shape) > 1 else shape
        for name, shape in shapes_of(model, work).items()
    }


def states_of(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The optimizer state of parameters."""
    return {f"{name}.{slot}": () if slot == "step" else shape for name, shape in shapes.items() for slot in SLOTS}


def rows_of(shape: Shape, rank: int, ranks: int) -> tuple[int, int]:
    """(first flat element, number of elements) of a rank, as FSDP2 divides rows; a scalar is of rank 0."""
    if not shape:
        return 0, int(rank == 0)
    rows, row = shape[0], math.prod(shape[1:])
    per_rank = -(-rows // ranks)
    start, stop = min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)
    return start * row, (stop - start) * row


def use_thin_chunks(model: str, work: Path) -> None:
    """Make the chunks of this process as small as thin tensors are; before anything else of the package is imported.

    What is sent to one rank as a whole are the vectors, as in a real step.
    """
    digests: Any = importlib.import_module("fsdp_shard.checkpoint.digests")
    longest = max((shape[0] for shape in shapes_of(model, work).values() if len(shape) == 1), default=1)
    digests.CHUNK_BYTES, digests.SMALL_BYTES = CHUNK_BYTES // BYTES, 2 * longest


def sparse_step(work: Path, model: str, ranks: int, *, with_optimizer: bool = True) -> Path:
    """A step of `ranks` ranks whose data are holes, with weights in bfloat16 and AdamW's state in float32.

    One that is there may have optimizer state that was not asked for.
    """
    from fsdp_shard.checkpoint import FileRecord, Manifest, TensorRecord, TensorSpec

    root = work / f"sparse-{model}-{ranks}"
    folders = ["", "optimizer/"] if with_optimizer else [""]
    if (root / "manifest.json").exists() and all((root / folder / "shards.index.json").exists() for folder in folders):
        return root
    shutil.rmtree(root, ignore_errors=True)
    shapes = shapes_of(model, work)
    weights = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    states = [TensorSpec(name, "F32", shape) for name, shape in states_of(shapes).items()]
    records: dict[str, Any] = {}
    for folder in folders:
        files = _write_sparse(root, folder, states if folder else weights, ranks)
        index = f"{folder}shards.index.json"
        records |= {name: FileRecord(size, header_digest="0" * 32) for name, size in files.items()}
        records[index] = FileRecord((root / index).stat().st_size, digest=_digest(root / index))
    tensors = {
        spec.name: TensorRecord("BF16", spec.shape, "0" * 32, ("0" * 32,) * -(-spec.num_bytes // CHUNK_BYTES))
        for spec in weights
    }
    manifest = Manifest("sharded", 100, ranks, {"shard": ranks}, records, tensors, {})
    (root / "manifest.json").write_text(manifest.to_json())
    return root


def thin_step(work: Path, model: str, ranks: int) -> Path:
    """A thin step of `ranks` ranks, all zeros, which is sound; `use_thin_chunks` was called."""
    from fsdp_shard.checkpoint import FileRecord, TensorSpec, convert, read_manifest

    root = work / f"thin-{model}-{ranks}"
    if (root / "optimizer").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    source, shapes = work / f"source-{model}", thin_shapes_of(model, work)
    _write_sparse(source, "", [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()], 1)
    convert(source, root, format="sharded", ranks=ranks, verify=False, sync=False)
    shutil.rmtree(source)
    manifest = read_manifest(root)
    assert manifest is not None
    states = [TensorSpec(name, "F32", shape) for name, shape in states_of(shapes).items()]
    for name in (*_write_sparse(root, "optimizer/", states, ranks), "optimizer/shards.index.json"):
        manifest.files[name] = FileRecord((root / name).stat().st_size, digest=_digest(root / name))
    (root / "manifest.json").write_text(manifest.to_json())
    return root


def dcp_metadata(work: Path, model: str, ranks: int) -> Path:
    """The `.metadata` that torch's planner and writer make of what the ranks of a save send, without the tensors."""
    import torch
    from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner, storage

    root = work / f"dcp-{model}-{ranks}"
    if (root / ".metadata").exists():
        return root / ".metadata"
    shutil.rmtree(root, ignore_errors=True)
    shapes = {f"model.{name}": shape for name, shape in shapes_of(model, work).items()}

    def plan(rank: int) -> Any:
        items = []
        for name, shape in shapes.items():
            start, count = (part // math.prod(shape[1:]) for part in rows_of(shape, rank, ranks))
            if count:
                offsets = torch.Size([start, *[0] * (len(shape) - 1)])
                chunk = metadata.ChunkStorageMetadata(offsets, torch.Size([count, *shape[1:]]))
                data = planner.TensorWriteData(chunk, metadata.TensorProperties(torch.bfloat16), torch.Size(shape))
                index = metadata.MetadataIndex(name, offsets)
                items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return planner.SavePlan(items)

    def results(rank: int, items: Any) -> list[Any]:
        found, position, file = [], 0, f"__{rank}_0.distcp"
        for item in items:
            size = 2 * math.prod(item.tensor_data.chunk.sizes) + 1500  # an item is an archive of torch.save
            found.append(storage.WriteResult(item.index, size, filesystem._StorageInfo(file, position, size)))
            position += size
        return found

    plans, described = default_planner.create_default_global_save_plan([_sent(plan(rank)) for rank in range(ranks)])
    described.planner_data = {name: ("model", name.removeprefix("model.")) for name in shapes}
    written = [_sent(results(rank, _sent(one).items)) for rank, one in enumerate(plans)]
    root.mkdir(parents=True)
    filesystem.FileSystemWriter(root, sync_files=False).finish(described, written)
    return root / ".metadata"


def _sent(value: Any) -> Any:
    """A value after it was sent to another rank: what objects in it shared with others, they share no more."""
    return pickle.loads(pickle.dumps(value))


def _write_sparse(root: Path, folder: str, specs: list[Any], ranks: int) -> dict[str, int]:
    """Write the rank files of tensors as holes, and their index; the sizes of the files by name."""
    from fsdp_shard.checkpoint import WriteRequest, writer

    (root / folder).mkdir(parents=True, exist_ok=True)
    plan = writer("sharded").plan(specs, WriteRequest(None, ranks, 100, {}))
    for file in plan.files:
        with (root / folder / file.name).open("wb") as out:
            out.write(file.header)
            out.truncate(file.num_bytes)
    for name, content in plan.small_files.items():
        (root / folder / name).write_bytes(content)
    return {folder + file.name: file.num_bytes for file in plan.files}


def _digest(file: Path) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(file.read_bytes())
