"""Hugging Face safetensors: one file, or several with `model.safetensors.index.json`. Each tensor is one piece.

Where a directory has both, the single file counts, as in transformers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import layout
from fsdp_shard.checkpoint.dtypes import TensorSpec
from fsdp_shard.checkpoint.entries import Piece, TensorEntry
from fsdp_shard.checkpoint.files import has_file, member
from fsdp_shard.checkpoint.formats.torch_huggingface import INFO_KEY, refuse_parts
from fsdp_shard.checkpoint.formats.weight_map import read_index_file, refuse_differences
from fsdp_shard.checkpoint.header import Header, read_header
from fsdp_shard.checkpoint.index import TensorIndex, aliases_in
from fsdp_shard.checkpoint.layout import Extent, TargetPlan, WriteRequest
from fsdp_shard.errors import CheckpointError

NAME = "huggingface"
LISTS_TIED_NAMES = False


def recognise(path: Path) -> bool:
    """A `.safetensors` file, or a directory with `model.safetensors`, its index, or a single `.safetensors` file."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and (has_file(path, layout.INDEX_FILE) or _single(path) is not None)


def read(path: Path) -> TensorIndex:
    """The index of a file or directory that `recognise` took."""
    if path.is_file():
        path = path.resolve()  # the user named this very file, wherever it may lead
        return read_files(path.parent, [path.name])
    single = _single(path)
    if single is not None:
        return read_files(path, [single])
    document = read_index_file(path, layout.INDEX_FILE)
    index = read_files(path, sorted(set(document["weight_map"].values())))
    held = {name: entry.pieces[0].file for name, entry in index.tensors.items()}
    refuse_differences(path / layout.INDEX_FILE, document["weight_map"], held)
    if INFO_KEY in index.metadata:
        _compare_size(path, document, index)
    return index


def plan(specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
    """A directory with `model.safetensors`, or with several files of at most `max_shard_bytes` and their index."""
    files, index = layout.plan_gathered(specs, request.max_shard_bytes, request.aliases, phases=request.phases)
    starts = {name: (file.name, offset) for file in files for name, offset in file.tensors.items()}
    extents = {spec.name: (Extent(0, spec.num_bytes, *starts[spec.name]),) for spec in specs}
    return TargetPlan(tuple(files), extents, {layout.INDEX_FILE: index} if index else {}, "gathered", 1)


def _single(path: Path) -> str | None:
    if has_file(path, layout.SINGLE_FILE):
        return layout.SINGLE_FILE
    found = [entry.name for entry in path.iterdir() if entry.suffix == ".safetensors"]
    is_one = len(found) == 1 and not has_file(path, layout.INDEX_FILE) and layout.parse_shard_name(found[0]) is None
    return found[0] if is_one else None


def read_files(root: Path, names: Sequence[str]) -> TensorIndex:
    """The index of these files of the directory `root`."""
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for file in names:
        header = read_header(member(root, file))
        refuse_parts(root / file, header)
        for name, entry in _entries(file, header).items():
            if name in tensors:
                other = tensors[name].pieces[0].file
                raise CheckpointError(f"{root}: tensor {name} stands both in {other} and in {file}.")
            tensors[name] = entry
        metadata.update(header.metadata)
    return TensorIndex(root, NAME, tensors, aliases_in(metadata, tensors), dict(metadata))


def _entries(file: str, header: Header) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, item.dtype, item.shape, (Piece(file, item.start, (0,) * len(item.shape), item.shape),))
        for name, item in header.tensors.items()
    }


def _compare_size(root: Path, document: dict[str, Any], index: TensorIndex) -> None:
    """For torch's writer only, whose total_size counts what all ranks wrote; others' totals are not to be relied on."""
    notes = document.get("metadata")
    total = notes.get("total_size") if isinstance(notes, dict) else None
    if isinstance(total, int) and total != index.num_bytes:
        raise CheckpointError(
            f"{root / layout.INDEX_FILE} says that {total} bytes of tensors were written, but the files hold "
            f"{index.num_bytes}: the ranks wrote over each other's files. Save sharded tensors with "
            "HuggingFaceStorageWriter(save_distributed=True)."
        )
