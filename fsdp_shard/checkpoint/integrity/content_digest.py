"""Identifies the model at a path by digests of its content that do not depend on the layout. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.digests import read_chunks
from fsdp_shard.checkpoint.formats.peft import read_adapter_config
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.utils import json_digest, read_bounded, read_json, report_progress

# Entries of adapter_config.json that do not change the adapter: where the base is, and who wrote it for what.
_NOT_OF_ADAPTER = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")
_OF_WRITERS = ("_name_or_path", "_commit_hash", "transformers_version")


def weights_digest(index: TensorIndex) -> str:
    """Return the xxh3_128 of names, dtypes, shapes and all bytes of the stored tensors, in the order of their names.

    It does not depend on their division into files: a conversion within the dtype keeps it, unless tied tensors are
    stored twice in one of the two. Reads all weights.
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
    """Describe the weights at `source` as JSON: path, format, step and digest.

    An adapter also has a digest of its settings, `adapter`, and the same description of its base, `base`.
    """
    found = {"path": source.path, "format": source.format, "step": source.step, "digest": weights_digest(source.index)}
    if not source.is_adapter:
        return found
    return found | {"adapter": _adapter_digest(source), "base": describe_weights(source.base)}


def _adapter_digest(source: Location) -> str:
    """Return the xxh3_128 of the settings in adapter_config.json that affect the result, such as the scale."""
    settings = read_adapter_config(source.weights)
    kept = {name: value for name, value in settings.items() if name not in _NOT_OF_ADAPTER}
    return json_digest(kept)


def config_digest(directory: Path, name: str = "config.json") -> str:
    """Return the xxh3_128 of a model's config, without entries that change no figure: its writer and origin.

    If the config names code of the model's own, the digest covers that code too.
    """
    found = read_json(directory / name)
    kept = {key: value for key, value in found.items() if key not in _OF_WRITERS} if isinstance(found, dict) else found
    if isinstance(found, dict) and "auto_map" in found:
        code = sorted(directory.glob("*.py"))
        kept["code"] = {path.name: xxhash.xxh3_128_hexdigest(read_bounded(path, "tokenizer_bytes")) for path in code}
    return json_digest(kept)


def describe_model(source: Location) -> dict[str, Any]:
    """Return `describe_weights` with the digest of the model's config, `config`."""
    return describe_weights(source) | {"config": config_digest(source.config_directory)}


def model_digests(model: Mapping[str, Any]) -> list[str]:
    """Return the digests in the result of `describe_model`: of config, weights, adapter settings and base model."""
    own = [model[name] for name in ("config", "digest", "adapter") if name in model]
    return [*own, *(model_digests(model["base"]) if "base" in model else [])]
