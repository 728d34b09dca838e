"""The index beside several weight files of whole tensors: which file each tensor is in. Knows JSON and names only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.files import member, read_json
from fsdp_shard.errors import CheckpointError


def read_index_file(root: Path, index_file: str) -> dict[str, Any]:
    """The content of `index_file` in `root`, its `weight_map` checked to be {tensor: file}."""
    where = member(root, index_file)
    document = read_json(where)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{where} has no weight_map from tensor names to file names.")
    if not weight_map:
        raise CheckpointError(f"{where} has an empty weight_map: the checkpoint has no tensors.")
    assert isinstance(document, dict)
    return document


def refuse_differences(where: Path, weight_map: Mapping[str, str], held: Mapping[str, str]) -> None:
    """CheckpointError unless the index at `where` says of each tensor what the files do; `held` is {tensor: file}."""
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise CheckpointError(f"{where} says that tensor {name} is in {file}, but that file does not hold it.")
    for name, file in held.items():
        if name not in weight_map:
            raise CheckpointError(f"{where} does not list tensor {name}, which {file} holds.")
