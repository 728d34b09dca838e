"""Loads the weights of any module, with any wrapper, from a checkpoint of any format, and writes them as a model."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import StepContent, StepStore, TensorIndex, locate
from fsdp_shard.distributed import Communicator, run_on_all, run_on_main, temporary_ranks
from fsdp_shard.errors import ConfigError, SaveError, StorageError
from fsdp_shard.sharding import (
    ModuleShards,
    ShardedModel,
    bare_module,
    fill_copied_buffers,
    shards_of,
    transformers_model,
)
from fsdp_shard.training.checkpoints.check_tensors import check_shared_memory, check_tensors
from fsdp_shard.training.checkpoints.checkpointer_document import StateTensors, first_difference
from fsdp_shard.training.checkpoints.side_files import check_processor, side_files
from fsdp_shard.utils import fsync_path, parse_size, path_text, refuse_remote

_TIMEOUT_SECONDS = 1800.0


def load_weights(
    model: nn.Module | ShardedModel,
    source: str | os.PathLike[str],
    *,
    base: str | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> str:
    """Load a model's weights from a checkpoint of any format, each rank only its own shard; a collective.

    Parameters may be plain, under DDP, FSDP1, FSDP2 or tensor-parallel, as for `Checkpointer`. Floating-point weights
    are cast to the dtype of the parameters. An adapter is merged into its base model.

    Args:
        model: The model, with memory for its parameters (`to_empty` after meta), or a result of `shard`.
        source: A run, a step, a model directory, a file of weights, or a hub id.
        base: The base model of an adapter, if it is not at the path recorded in the adapter.
        timeout_seconds: How long ranks wait for each other.

    Returns:
        A line for each kind of stored tensors that were skipped because the model does not have them, such as those
        that `from_pretrained` skips. For models other than those of transformers, no tensors are skipped.

    Raises:
        CheckpointError: On all ranks: tensors are missing, unexpected, have another shape or kind of numbers, have
            different values where the model has one memory for both, or values that float16 does not hold.
        ConfigError: The source or base is neither a path nor a hub id, or `timeout_seconds` is out of range.
        ModelError: `model` is not a module, has parameters without values, or is a hub id that cannot be fetched.
        RemoteError: What an address leads to cannot be fetched.

    Example:
        >>> import torch, fsdp_shard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> fs.load_weights(model, linear_file)
        ''
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"load_weights takes the path or hub id of a checkpoint as source, not {source!r}.")
    with temporary_ranks(timeout_seconds) as ranks:
        return _load(model, source, base, ranks)


def _load(
    model: nn.Module | ShardedModel,
    source: str | os.PathLike[str],
    base: str | None,
    ranks: Communicator,
) -> str:
    """Load the weights, and return the note about skipped tensors."""
    shards = run_on_all(ranks, lambda: shards_of(model, ranks))
    location = run_on_all(ranks, lambda: locate(source, base=base))
    with run_on_all(ranks, lambda: location.model_index) as index:
        names, note = run_on_all(ranks, lambda: _match_names(bare_module(model), shards, index))
        loaded = {name: shards.shards[name] for name in names}
        for shard in loaded.values():  # a background save may be reading them
            increment_version(shard.tensor)
        run_on_all(ranks, lambda: checkpoint.load_shards(index, loaded, names))
        fill_copied_buffers(ModuleShards(loaded, {}))
    return note


def _match_names(model: nn.Module, shards: ModuleShards, index: TensorIndex) -> tuple[Mapping[str, str], str]:
    """The stored name of each parameter, and the line about skipped tensors."""
    checkpoint.check_loadable(index)
    of_transformers = transformers_model(model)
    if of_transformers is not None and not FullyShardedDataParallel.fsdp_modules(model):
        matched = checkpoint.match_names(of_transformers, index)
        names = {name: stored for name, stored in matched.stored.items() if name in shards.shards}
        check_shared_memory(index, {name: shards.shards[name] for name in names}, names)
        return names, matched.note
    check_tensors(index, shards)
    return {name: name for name in shards.shards}, ""


def save_pretrained(
    model: nn.Module | ShardedModel,
    directory: str | os.PathLike[str],
    *,
    processor: Any = None,
    max_shard_size: str = "5GB",
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Path:
    """Write a model, sharded by any wrapper, as a Hugging Face directory; a collective.

    Nothing is gathered: each rank writes its own elements to their place in the files. The directory is complete or
    absent. Its manifest lets `fsdp-shard verify` check it.

    Args:
        model: The model; for a transformers model, config and generation config are written, too.
        directory: The directory, which must not exist.
        processor: A transformers tokenizer or processor to save with the model.
        max_shard_size: Maximum size of a file, such as 5GB.
        timeout_seconds: How long ranks wait for each other.

    Returns:
        The directory.

    Raises:
        ConfigError: The directory is no local path, `max_shard_size` is not a size, `timeout_seconds` is out of range,
            or `processor` cannot be saved.
        ModelError: `model` is not a module, or has parameters without values.
        SaveError: The directory exists already or could not be written, or the ranks differ in parameters that each of
            them holds in full.

    Example:
        >>> import torch, fsdp_shard as fs
        >>> fs.save_pretrained(torch.nn.Linear(2, 1), tmp_path / "model").name
        'model'
    """
    check_processor(processor)
    refuse_remote(path_text(directory), "directory", "save into a local directory and copy that.")
    target, size = Path(directory).expanduser(), parse_size(max_shard_size, "max_shard_size")
    with temporary_ranks(timeout_seconds) as ranks:
        shards = run_on_all(ranks, lambda: shards_of(model, ranks))
        files = run_on_all(ranks, lambda: side_files(model, processor) if ranks.is_main else {})
        run_on_main(ranks, lambda: _refuse_existing(target))
        _refuse_differences(target, shards, ranks)
        _save(target, StepContent(shards.shards, shards.aliases, model_files=files), size, ranks)
    return target


def _save(target: Path, content: StepContent, size: int, ranks: Communicator) -> None:
    """Write a model next to `target`, then rename it."""
    store = StepStore(target.parent / f".{target.name}.partial-{uuid.uuid4().hex}")  # rank 0's is used
    try:
        step = checkpoint.save_step(ranks, store, 0, content, layout="gathered", max_shard_bytes=size)
        run_on_main(ranks, lambda: _rename(step, target))
    finally:
        if ranks.is_main:
            shutil.rmtree(store.root, ignore_errors=True)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise SaveError(f"{target} exists already; delete it, or give another directory.")


def _refuse_differences(target: Path, shards: ModuleShards, ranks: Communicator) -> None:
    """Reject a model that the ranks hold in full with different values: the files would have some of each rank."""
    tensors = StateTensors(ranks)
    run_on_all(ranks, lambda: tensors.add_digests_of(shards))
    if (name := first_difference(ranks, tensors.digests)) is not None:
        raise SaveError(
            f"{target} was not written: the ranks differ in {name}, and only the value of one rank could be saved. "
            f"Make them equal first, as DistributedDataParallel does when it wraps a model."
        )


def _rename(step: Path, target: Path) -> None:
    _refuse_existing(target)
    try:
        os.rename(step, target)
        fsync_path(target.parent)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror}.") from error
