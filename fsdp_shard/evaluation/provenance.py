"""What the figures of an evaluation were computed from, for result.json: weights, tokenizer, settings and versions."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from fsdp_shard.checkpoint import Location, TensorIndex, itemsize
from fsdp_shard.data import tokenizer_state
from fsdp_shard.evaluation.config import EvaluateSettings
from fsdp_shard.utils import report_progress

_READ_BYTES = 1 << 20
_PACKAGES = ("fsdp-shard", "torch", "transformers", "tokenizers", "numpy")


def weights_digest(index: TensorIndex) -> str:
    """Return the xxh3_128 of names, dtypes, shapes and all bytes of the stored tensors, in the order of their names.

    It does not depend on how they are divided into files: a checkpoint that is converted within its dtype keeps it,
    unless tied tensors are stored twice in one of the two. All weights are read for it.
    """
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with report_progress(index.num_bytes, "digest of the weights", "B") as count:
        for name in sorted(index.names):
            entry = index.entry(name)
            size = itemsize(entry.dtype)
            digest.update(f"{name} {entry.dtype} {tuple(entry.shape)} ".encode())
            for start in range(0, entry.num_elements, _READ_BYTES // size):
                part = buffer[: min(_READ_BYTES // size, entry.num_elements - start) * size]
                index.read_into(name, start, part)
                digest.update(part)
                count(len(part))
    return digest.hexdigest()


def describe_weights(source: Location) -> dict[str, Any]:
    """Return, as JSON, which weights lie at `source`: path, format, step and digest, of an adapter its base's, too."""
    found = {"path": source.path, "format": source.format, "step": source.step, "digest": weights_digest(source.index)}
    return found | ({"base": describe_weights(source.base)} if source.is_adapter else {})


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the xxh3_128 of all that decides about the tokens of a text or a conversation."""
    state = [tokenizer_state(tokenizer), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute the figures."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def provenance(
    settings: EvaluateSettings, tokenizer: PreTrainedTokenizerBase, settled: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the figures of an evaluation depend on, as JSON.

    Args:
        settings: The settings.
        tokenizer: The tokenizer.
        settled: Settings that belong to the task.
    """
    dispatch = {name: value for name, value in asdict(settings.dispatch).items() if name != "prefetch_blocks"}
    return {
        "weights": describe_weights(settings.source),
        "tokenizer": {"digest": tokenizer_digest(tokenizer)},
        "settings": {"task": settings.task, **settled, "batch_size": settings.batch_size, "dispatch": dispatch},
        "versions": versions(),
    }
