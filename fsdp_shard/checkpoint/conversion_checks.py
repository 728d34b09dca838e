"""What `convert` refuses before it writes: sources that it would copy wrongly, and targets that hold other files."""

import os
from collections.abc import Collection
from pathlib import Path

from fsdp_shard.checkpoint.formats.registry import recognize
from fsdp_shard.checkpoint.formats.several_files import num_files
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.keys.quantized_weights import (
    DEQUANTIZED,
    configured_quantization,
    quantization,
    quantization_settings,
)
from fsdp_shard.checkpoint.model_files import has_quantization_file, list_files, read_config
from fsdp_shard.checkpoint.open import open_weights
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA, INDEX_FILE
from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX
from fsdp_shard.checkpoint.steps.step_store import LATEST, StepStore, parse_step
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import first_few, format_count

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".distcp", ".bin", ".pt", ".pth", ".gguf"})
_TRAINER_STATES = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")  # other files of trainers


def refuse_part(index: TensorIndex) -> None:
    """Refuse one of the files of a model."""
    if index.file is not None and (count := num_files(index.file.name)) > 1:
        raise CheckpointError(f"{index.file} is one of {count} files of a model; give their directory.")


def refuse_undecodable(index: TensorIndex) -> None:
    """Refuse a file that HQQ itself wrote: it needs numbers for each weight that no tensor keeps."""
    if quantization(index) != "hqq" or configured_quantization(index.model_directory) is not None:
        return
    for name in index.tensors:
        if name.endswith(".W_q") and name.removesuffix("W_q") + "nbits" not in index.tensors:
            raise CheckpointError(
                f"{index.path} is quantized by HQQ, which needs more than the tensors of {name} (their nbits, shape "
                f"and packing), and no other format keeps that; give the model that it was made from."
            )


def refuse_cast(index: TensorIndex, dtype: str) -> None:
    """Refuse a cast of the scales of quantized weights, on which each weight depends, or of their inputs."""
    if dtype != "keep" and (method := quantization(index)) is not None:
        raise CheckpointError(
            f"{index.path} is quantized ({method}), and dtype={dtype} would cast its scales or what they are "
            f"computed from, and so change its weights; remove dtype to keep them as they are, or "
            + ("add dequantize=true." if method in DEQUANTIZED else "give the model that it was made from.")
        )


def refuse_plain_config(index: TensorIndex, config: str | None) -> None:
    """Refuse a passed config that does not say that the weights are quantized: they would be read as plain numbers."""
    directory = index.model_directory
    if config is None or (method := quantization(index)) is None:
        return
    is_said = quantization_settings(directory) or read_config(directory).get("quantization")  # MLX's name
    if not is_said and not has_quantization_file(directory):
        raise CheckpointError(
            f"{index.path} is quantized ({method}), and config={config} has no quantization_config that says so; give "
            f"a config that has it" + (", or add dequantize=true." if method in DEQUANTIZED else ".")
        )


def check_target(target: Path, index: TensorIndex, replaced: Collection[str] | None) -> None:
    """Refuse a target with anything but weights and `replaced` files; None if it must not exist."""
    atomicity.recover(target)
    if index.root.resolve().is_relative_to(target.resolve()) and index.root.resolve() != target.resolve():
        raise CheckpointError(f"{target} contains the source {index.root}; give another target.")
    if parse_step(target.name) is not None and StepStore(target.parent).pointer(LATEST) is not None:
        raise CheckpointError(
            f"{target} would be a step of the run whose steps are in {target.parent}, which could not resume from it; "
            f"give another target."
        )
    if target.is_symlink() or os.path.ismount(target):
        kind = "a link" if target.is_symlink() else "a mount point"
        raise CheckpointError(f"{target} is {kind}, which a directory cannot replace; give a target below it.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if replaced is None:
        raise CheckpointError(f"{target} exists already; give another target, or overwrite=true to replace it.")
    if not target.is_dir() or recognize(target) is None:
        raise CheckpointError(
            f"{target} exists and is not a checkpoint directory, so overwrite=true does not replace it."
        )
    if others := _other_files(target, replaced):
        raise CheckpointError(
            f"{target} holds {first_few(others)} besides its weights, which overwrite=true would delete; move them "
            "away, or give another target."
        )


def _other_files(target: Path, replaced: Collection[str]) -> list[str]:
    """List the contents of a checkpoint directory that are neither weights nor `replaced` files."""
    extras: list[str] = []
    try:
        with open_weights(target) as index:
            known = {piece.file for entry in index.tensors.values() for piece in entry.pieces}
            extras = [format_count(extra.num_tensors, f"{kind} tensor") for kind, extra in index.extras.items()]
    except CheckpointError:  # a damaged checkpoint may be replaced, too: file names show its weights
        files = (entry.name for entry in target.iterdir() if entry.suffix in _WEIGHT_SUFFIXES and not entry.is_dir())
        known = {name for name in files if not name.startswith(_TRAINER_STATES)}
    known |= {MANIFEST, INDEX_FILE, SHARD_INDEX, DCP_METADATA, "pytorch_model.bin.index.json", *replaced}
    return extras + [name for name in list_files(target) if name not in known]
