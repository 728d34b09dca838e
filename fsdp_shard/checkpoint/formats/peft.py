"""An adapter as peft saves it: `adapter_config.json` beside `adapter_model.safetensors`. Imports no torch, no peft.

The index holds the adapter's own tensors under their stored names. What they make of a base model, `merge` knows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats import huggingface
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io.files import has_file, member, read_json
from fsdp_shard.errors import CheckpointError

NAME = "peft"
KEEPS_NAMES = True  # they say which module is adapted
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def recognize(path: Path) -> bool:
    """A directory with both files."""
    return path.is_dir() and has_file(path, CONFIG) and has_file(path, WEIGHTS)


def read(path: Path) -> TensorIndex:
    """The index of a directory that `recognize` took."""
    read_config(path)
    return replace(huggingface.read_files(path, [WEIGHTS]), format=NAME)


def read_config(path: Path) -> dict[str, Any]:
    """The parsed adapter_config.json of an adapter's directory."""
    config = read_json(member(path, CONFIG))
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise CheckpointError(f"{path / CONFIG} names no peft_type, so it does not say which kind of adapter this is.")
    return config


def base_of(path: Path) -> str:
    """The directory or hub id of the model that an adapter is for."""
    base = read_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{path / CONFIG} names no base_model_name_or_path, so it does not say which model this adapter is for; "
            f"write it there, or convert with base=PATH."
        )
    return base
