"""Finds files from earlier pushes in a repository that would be loaded together with a new model."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_shard.checkpoint.formats.peft import ADAPTER_CONFIG
from fsdp_shard.checkpoint.model_files import CONFIG, is_settings_file, is_tokenizer_file
from fsdp_shard.utils import matches_any

# The names that from_pretrained looks for. Variants (model.fp16.safetensors) are loaded only on request, and stay.
_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    ADAPTER_CONFIG,
)


def stale_files(names: Collection[str], sent: Collection[str]) -> tuple[str, ...]:
    """Select the files that a push deletes, in addition to manifest.json.

    Args:
        names: All files of the repository.
        sent: The pushed files: a model or an adapter, with or without a tokenizer.

    Returns:
        Names of weight files, of tokenizer files if one is pushed, and of configs if a model or an adapter is pushed.
    """
    has_tokenizer = any(map(is_tokenizer_file, sent))
    has_model = CONFIG in sent or ADAPTER_CONFIG in sent

    def is_stale(name: str) -> bool:
        is_weights = "/" not in name and matches_any(name, _WEIGHTS)
        return is_weights or (has_tokenizer and is_tokenizer_file(name)) or (has_model and is_settings_file(name))

    return tuple(name for name in names if name not in sent and is_stale(name))
