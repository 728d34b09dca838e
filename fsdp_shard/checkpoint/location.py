"""From what a user names to config, tokenizer and weights: a checkpoint of any kind, what lies around it, a hub id."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_shard.checkpoint import open_local
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.io.files import has_file
from fsdp_shard.checkpoint.model_files import has_tokenizer, side_files
from fsdp_shard.checkpoint.open import here, open_checkpoint
from fsdp_shard.models import ModelSource, resolve


def locate(
    path: str | os.PathLike[str],
    gguf_file: str | None = None,
    *,
    need_weights: bool = False,
    fetch_weights: bool = True,
) -> ModelSource:
    """Where config, tokenizer and weights of `path` lie: a run (its latest step), a checkpoint, a model, a hub id.

    Without `fetch_weights`, those of a hub id are not downloaded. Of an adapter, config and tokenizer are its base
    model's, unless a tokenizer lies beside it. Raises ModelError when there is no config, or (with `need_weights`)
    there are no weights; CheckpointError where several checkpoints lie there.
    """
    place = here(path)
    if not place.exists() or gguf_file is not None:
        return resolve(path, gguf_file, need_weights=need_weights, fetch_weights=fetch_weights)
    found = open_local.locate(place)
    if peft.recognize(found.weights):
        own = found.weights if has_tokenizer(found.weights) else None
        return ModelSource(
            locate(peft.base_of(found.weights), fetch_weights=fetch_weights).directory, found.weights, own
        )
    if found.side is not None:
        return ModelSource(resolve(found.side, need_weights=False).directory, found.weights)
    return resolve(found.weights, need_weights=need_weights)


def state_of(source: ModelSource) -> list[tuple[str, int, int]]:
    """Name, bytes and time of the last change (ns) of each file that says what the model is: weights, an adapter and
    its base, config, tokenizer. Of what lies there later, as of a run that has gone on, another list.

    Raises CheckpointError.
    """
    places = [(source.weights, source.directory)]
    if peft.recognize(source.weights):
        base = locate(peft.base_of(source.weights))
        places = [(source.weights, source.weights), (base.weights, base.directory)]
    return [file for weights, side in places for file in _files(weights, side)]


def _files(weights: Path, side: Path) -> list[tuple[str, int, int]]:
    with open_checkpoint(weights) as index:
        paths = [index.root / piece.file for entry in index.tensors.values() for piece in entry.pieces]
    names = [*side_files(side), *([peft.CONFIG] if has_file(side, peft.CONFIG) else [])]
    stats = [(path.name, path.stat()) for path in sorted({*paths, *(side / name for name in names)})]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
