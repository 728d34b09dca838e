"""Format `huggingface`: one safetensors file, or several with `model.safetensors.index.json`. Each tensor is one piece.

In a directory with both, the single file is used, as in transformers. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats.dcp.dcp_safetensors import INFO_KEY, refuse_parts
from fsdp_shard.checkpoint.formats.several_files import add_entry, num_files
from fsdp_shard.checkpoint.index import TensorIndex, aliases_in
from fsdp_shard.checkpoint.io import TensorSpec, has_file, member, read_header
from fsdp_shard.checkpoint.steps import file_plan
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import parse_json, read_bounded, refuse_excess

NAME = "huggingface"
LISTS_TIED_NAMES = False


def recognize(path: Path) -> bool:
    """Whether `path` is a `.safetensors` file, or a directory with `model.safetensors`, its index, or one such file."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and (has_file(path, file_plan.INDEX_FILE) or _single(path) is not None)


def read(path: Path) -> TensorIndex:
    """Return the index of a file or directory that `recognize` accepts."""
    if path.is_file():
        path = path.resolve()  # the user named this file, so a link is followed
        return read_files(path.parent, [path.name])
    single = _single(path)
    if single is not None:
        return read_files(path, [single])
    document = read_index_file(path, file_plan.INDEX_FILE)
    index = read_files(path, sorted(set(document["weight_map"].values())))
    held = {name: entry.pieces[0].file for name, entry in index.tensors.items()}
    refuse_differences(path / file_plan.INDEX_FILE, document["weight_map"], held)
    if INFO_KEY in index.metadata:
        _compare_size(path, document, index)
    return index


def plan(specs: Sequence[TensorSpec], request: file_plan.WriteRequest) -> file_plan.TargetPlan:
    """Plan a directory with `model.safetensors`, or with several files of at most `max_shard_bytes` and their index."""
    files, index = file_plan.plan_gathered(
        specs,
        request.max_shard_bytes,
        request.aliases,
        source_offsets=request.source_offsets,
        metadata=request.metadata,
    )
    starts = {name: (file.name, offset) for file in files for name, offset in file.tensors.items()}
    extents = {spec.name: (file_plan.Extent(0, spec.num_bytes, *starts[spec.name]),) for spec in specs}
    return file_plan.TargetPlan(tuple(files), extents, {file_plan.INDEX_FILE: index} if index else {}, "gathered", 1)


def _single(path: Path) -> str | None:
    if has_file(path, file_plan.SINGLE_FILE):
        return file_plan.SINGLE_FILE
    found = [entry.name for entry in path.iterdir() if entry.suffix == ".safetensors"]
    if len(found) != 1 or has_file(path, file_plan.INDEX_FILE) or _is_part(path):
        return None
    is_whole = num_files(found[0]) == 1 and file_plan.parse_shard_name(found[0]) is None
    return found[0] if is_whole else None


def _is_part(path: Path) -> bool:
    """Whether a `.safetensors` file of any name may be a rank file of torch_checkpointing."""
    if not has_file(path, "metadata.pkl"):
        return False  # the usual case, which does not import the pickle reader
    from fsdp_shard.checkpoint.formats.torch_checkpointing_metadata import has_metadata

    return has_metadata(path)


def read_files(root: Path, names: Sequence[str]) -> TensorIndex:
    """Return the index of these files in the directory `root`."""
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for file in names:
        header = read_header(member(root, file))
        refuse_parts(root / file, header)
        for name, item in header.tensors.items():
            piece = Piece(file, item.start, (0,) * len(item.shape), item.shape)
            add_entry(tensors, TensorEntry(name, item.dtype, item.shape, (piece,)), root)
        metadata.update(header.metadata)
    return TensorIndex(root, NAME, tensors, aliases_in(metadata, tensors), dict(metadata))


def _compare_size(root: Path, document: dict[str, Any], index: TensorIndex) -> None:
    """Only for torch's writer, whose total_size covers all ranks; the totals of other writers are unreliable."""
    notes = document.get("metadata")
    total = notes.get("total_size") if isinstance(notes, dict) else None
    if isinstance(total, int) and total != index.num_bytes:
        raise CheckpointError(
            f"{root / file_plan.INDEX_FILE} says that {total} bytes of tensors were written, but the files hold "
            f"{index.num_bytes}: the ranks wrote over each other's files. Save sharded tensors with "
            "HuggingFaceStorageWriter(save_distributed=True)."
        )


def read_index_file(root: Path, index_file: str) -> dict[str, Any]:
    """Read `index_file` in `root`, and check that its `weight_map` is {tensor: file}."""
    where = member(root, index_file)
    data = read_bounded(where, "metadata_bytes")
    refuse_excess(data.count(b'":'), "tensors", f"{where} lists too many tensors")
    document = parse_json(data, str(where))
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{where} has no weight_map from tensor names to file names.")
    if not weight_map:
        raise CheckpointError(f"{where} has an empty weight_map: the checkpoint has no tensors.")
    assert isinstance(document, dict)
    return document


def refuse_differences(where: Path, weight_map: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the index at `where` and the files (`held`: {tensor: file}) have equal tensors."""
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise CheckpointError(f"{where} says that tensor {name} is in {file}, but that file does not hold it.")
    for name, file in held.items():
        if name not in weight_map:
            raise CheckpointError(f"{where} does not list tensor {name}, which {file} holds.")
