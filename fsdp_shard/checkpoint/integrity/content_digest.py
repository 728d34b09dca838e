"""Which weights lie at a path, by a digest of their content that does not depend on the layout. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.digests import read_chunks
from fsdp_shard.checkpoint.formats.peft import read_adapter_config
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.utils import json_digest, read_json, report_progress

# Of adapter_config.json: where the base is, and who wrote it for what.
_NOT_OF_ADAPTER = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")
_OF_WRITERS = ("_name_or_path", "_commit_hash", "transformers_version")


def weights_digest(index: TensorIndex) -> str:
    """Return the xxh3_128 of names, dtypes, shapes and all bytes of the stored tensors, in the order of their names.

    It does not depend on how they are divided into files: a checkpoint that is converted within its dtype keeps it,
    unless tied tensors are stored twice in one of the two. All weights are read for it.
    """
    digest = xxhash.xxh3_128()
    with report_progress(index.num_bytes, "digest of the weights", "B") as count:
        for name in sorted(index.names):
            entry = index.entry(name)
            digest.update(f"{name} {entry.dtype} {tuple(entry.shape)} ".encode())
            for part in read_chunks(index, name):
                digest.update(part)
                count(len(part))
    return digest.hexdigest()


def describe_weights(source: Location) -> dict[str, Any]:
    """Return, as JSON, which weights lie at `source`: path, format, step and digest.

    Of an adapter it has a digest of its settings, `adapter`, and all of this of its base, `base`, too.
    """
    found = {"path": source.path, "format": source.format, "step": source.step, "digest": weights_digest(source.index)}
    if not source.is_adapter:
        return found
    return found | {"adapter": _adapter_digest(source), "base": describe_weights(source.base)}


def _adapter_digest(source: Location) -> str:
    """The xxh3_128 of what adapter_config.json says of how the adapter is applied, such as its scale."""
    settings = read_adapter_config(source.weights)
    kept = {name: value for name, value in settings.items() if name not in _NOT_OF_ADAPTER}
    return json_digest(kept)


def config_digest(directory: Path, name: str = "config.json") -> str:
    """Return the xxh3_128 of a model's config, without what changes no figure: who wrote it, and from where."""
    found = read_json(directory / name)
    kept = {key: value for key, value in found.items() if key not in _OF_WRITERS} if isinstance(found, dict) else found
    return json_digest(kept)


def describe_model(source: Location) -> dict[str, Any]:
    """Return what `describe_weights` does, and the digest of the config that the model is built from."""
    return describe_weights(source) | {"config": config_digest(source.directory)}


def model_digests(model: Mapping[str, Any]) -> list[str]:
    """Return the digests in what `describe_model` returns: of config, weights, adapter settings and base model."""
    own = [model[name] for name in ("config", "digest", "adapter") if name in model]
    return [*own, *(model_digests(model["base"]) if "base" in model else [])]
