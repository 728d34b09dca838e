"""Selects a checkpoint's files for the hub: those that transformers and peft load, and no files of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fsdp_shard.checkpoint.formats import huggingface
from fsdp_shard.checkpoint.formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.checkpoint.model_files import has_tokenizer, list_model_files, replace_tokenizer
from fsdp_shard.checkpoint.remote.hub_push import CARD
from fsdp_shard.checkpoint.steps.file_plan import INDEX_FILE, SINGLE_FILE
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, read_manifest
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import read_bounded, say


def is_loadable(location: Location) -> bool:
    """Return whether a checkpoint is a Hugging Face directory, which is pushed unchanged."""
    is_one = location.format == huggingface.NAME and location.weights.is_dir() and location.side is None
    return is_one and any(has_file(location.weights, name) for name in (SINGLE_FILE, INDEX_FILE))


def model_to_push(location: Location) -> dict[str, Path]:
    """Return the files of a Hugging Face directory by name: weights, model files and README.md.

    Raises:
        CheckpointError: The weights are damaged, or a file is a link out of the directory.
        ModelError: There is no config.json.
    """
    root = location.config_directory
    files = {**location.model_files, **_weights(location)}
    others = [CARD, *(() if SINGLE_FILE in files else (INDEX_FILE,))]
    files |= {name: member(root, name) for name in others if has_file(root, name)}
    manifest = read_manifest(root) if has_file(root, MANIFEST) else None
    if manifest is not None and manifest.files.keys() <= files.keys():  # not of a step, which also has an optimizer
        files[MANIFEST] = member(root, MANIFEST)
    return dict(sorted(files.items()))


def adapter_to_push(location: Location, base: str) -> dict[str, Path | bytes]:
    """Return an adapter's files by name, with `base` as its base model: a local path is of no use to others.

    Raises:
        CheckpointError: The checkpoint is not an adapter, or is damaged.
    """
    if not location.is_adapter:
        raise CheckpointError(
            f"{location.path} is not an adapter, so --adapter {base} has no effect; remove it to push the model."
        )
    root = location.weights
    if location.new_head is not None:
        raise CheckpointError(
            f"{location.path} is an adapter with a new head of a classifier, whose classes peft's files do not name; "
            f"convert it to a model, and push that."
        )
    if not has_file(root, ADAPTER_WEIGHTS):
        raise CheckpointError(
            f"{location.path} is an adapter in rank files, which peft does not read; push it as a model, without "
            f"--adapter, or push the step that it is in."
        )
    stored = read_adapter_config(root)
    settings = {**stored, "base_model_name_or_path": base}
    tokenizer = replace_tokenizer({}, list_model_files(root)) if has_tokenizer(root) else {}
    files: dict[str, Path | bytes] = {**_weights(location)}
    files |= {**tokenizer, ADAPTER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}
    if has_file(root, CARD) and not _is_card_of_peft(member(root, CARD), stored.get("base_model_name_or_path"), base):
        files[CARD] = member(root, CARD)
    return dict(sorted(files.items()))


def _is_card_of_peft(file: Path, stored_base: object, base: str) -> bool:
    """Return whether a README.md is the form of peft's save_pretrained, which contains a path of the machine."""
    content = read_bounded(file, "tokenizer_bytes").decode(errors="replace")
    names_it = re.search(rf"^base_model:\s*['\"]?{re.escape(str(stored_base))}['\"]?\s*$", content, re.MULTILINE)
    is_one = "# Model Card for Model ID" in content or (stored_base != base and names_it is not None)
    if is_one:
        say(f"{file} is one that peft writes, so a model card is made instead")
    return is_one


def _weights(location: Location) -> dict[str, Path]:
    root = location.weights if location.weights.is_dir() else location.weights.parent
    return {path.relative_to(root).as_posix(): path for path in location.index.files()}
