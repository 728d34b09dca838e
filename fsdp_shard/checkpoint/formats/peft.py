"""Format `peft`: an adapter, `adapter_config.json` with `adapter_model.safetensors` as saved by peft, or with rank
files as a run saves an adapter's average.

The index holds the adapter's own tensors under their stored names; `lora_merge` applies them to a base model. Imports
neither torch nor peft.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats import huggingface, native_sharded
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import read_json

NAME = "peft"
KEEPS_NAMES = True  # they name the adapted modules
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LONGEST_PATH = 4096  # PATH_MAX of Linux
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)  # from which the hub's cache forms a path


def is_adapter(path: Path) -> bool:
    """Whether `path` is a directory with adapter_config.json, and the weights as one file or as rank files."""
    if not path.is_dir() or not has_file(path, ADAPTER_CONFIG):
        return False
    return has_file(path, ADAPTER_WEIGHTS) or native_sharded.recognize(path)


recognize = is_adapter  # the registry calls this name; the door exports the other one


def read(path: Path) -> TensorIndex:
    """The index of a directory that `recognize` accepts."""
    read_adapter_config(path)
    if has_file(path, ADAPTER_WEIGHTS):
        return replace(huggingface.read_files(path, [ADAPTER_WEIGHTS]), format=NAME)
    return replace(native_sharded.read(path), format=NAME)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Read the adapter_config.json in the directory of an adapter.

    Args:
        path: The directory.

    Returns:
        The parsed document, which has a `peft_type`.

    Raises:
        CheckpointError: The file is missing, or is not an adapter's config.
    """
    config = read_json(member(path, ADAPTER_CONFIG))
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise CheckpointError(f"{path / ADAPTER_CONFIG} has no peft_type, so the kind of adapter is not known.")
    return config


def base_of(path: Path) -> str:
    """The directory or hub id of an adapter's base model."""
    base = read_adapter_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not 0 < len(base) <= _LONGEST_PATH:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG} has no base_model_name_or_path that can be a path or a hub id, so the model of "
            f"this adapter is not known; add it to the file, or give base=PATH in generate, evaluate and convert, "
            f"--base in verify and diff."
        )
    return base


def revision_of_base(path: Path) -> str | None:
    """The branch, tag or commit of an adapter's base model, if that is on the hub; None for the default."""
    revision = read_adapter_config(path).get("revision") or None
    if revision is not None and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: revision is {repr(revision)[:80]}; expected a branch, tag or commit on the hub."
        )
    return revision
