"""From what a user names to config, tokenizer and weights: a checkpoint of any kind, what lies around it, a hub id."""

from __future__ import annotations

import os

from fsdp_shard import models
from fsdp_shard.checkpoint.formats import peft, registry
from fsdp_shard.checkpoint.remote_url import here
from fsdp_shard.models import ModelSource


def locate(path: str | os.PathLike[str], gguf_file: str | None = None, *, need_weights: bool = False) -> ModelSource:
    """Where config, tokenizer and weights of `path` lie: a run (its latest step), a checkpoint, a model, a hub id.

    Of an adapter, config and tokenizer are its base model's. Raises ModelError when there is no config, or (with
    `need_weights`) there are no weights; CheckpointError where several checkpoints lie there.
    """
    place = here(path)
    if not place.exists() or gguf_file is not None:
        return models.resolve(path, gguf_file, need_weights=need_weights)
    found = registry.locate(place)
    if peft.recognise(found.weights):
        return ModelSource(locate(peft.base_of(found.weights)).directory, found.weights)
    if found.side is not None:
        return ModelSource(models.resolve(found.side, need_weights=False).directory, found.weights)
    return models.resolve(found.weights, need_weights=need_weights)
