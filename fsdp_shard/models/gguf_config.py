"""Converts config, generation config and tokenizer of a GGUF file to Hugging Face files.

A GGUF file stores them in its metadata, which transformers reads in about 10 s for a vocabulary of 49,152 tokens,
separately for each of them. The first process that needs them therefore writes them to a cache.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ModelError
from fsdp_shard.models.file_errors import MADE_FROM, model_errors
from fsdp_shard.utils import atomic_directory, run_limited, user_cache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The format name, defined here so that comparing a checkpoint's format imports nothing else.
GGUF_FORMAT = "gguf"
_VERSION = 4  # changes with the content of the files
_TIMES = 4  # as long as other work on as many bytes: transformers needs 5 s for a megabyte of tokens
_SCALING = ("type", "factor", "original_context_length", "finetuned")  # the keys that are supported, or have no effect


def gguf_model_files(file: Path, header_bytes: int = 0) -> Path:
    """Return a directory with config.json, generation_config.json and the tokenizer files of a GGUF file.

    Several processes may call this at the same time.

    Args:
        file: The GGUF file.
        header_bytes: The bytes in it before the first tensor.

    Raises:
        ModelError: transformers cannot create the files or takes too long for a header of this size, or the cache
            cannot be written.
    """
    target = user_cache("gguf") / _key(file)
    if target.is_dir():
        return target
    try:
        with atomic_directory(target) as partial:
            import gguf  # noqa: F401  # before the time is counted
            import transformers.integrations.ggml
            import transformers.modeling_utils  # noqa: F401

            run_limited(
                lambda: _write_model_files(file, partial),
                f"making the config and the tokenizer of {file}",
                _TIMES * header_bytes,
                kind="build",
                error=ModelError,
            )
    except OSError as error:
        raise ModelError(
            f"The config and tokenizer of {file} could not be written to {target.parent}: {error}. "
            f"Set XDG_CACHE_HOME to a directory that can be written."
        ) from error
    return target


def _key(file: Path) -> str:
    """Return a name that changes with the file and the version of transformers."""
    from importlib.metadata import version  # slow to import, and every command imports this module

    state = file.stat()
    parts = (str(file.resolve()), state.st_size, state.st_mtime_ns, version("transformers"), _VERSION)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _write_model_files(file: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # In a separate directory: transformers prefers a tokenizer.json in the same directory.
    (alone := directory / "alone").mkdir()
    (alone / file.name).symlink_to(file.resolve())
    with model_errors(f"{file} cannot be used as a model"):
        try:
            config = AutoConfig.from_pretrained(alone, gguf_file=file.name, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name, trust_remote_code=False)
        finally:
            shutil.rmtree(alone)
        if scaling := _rope_scaling(file, config):
            config.rope_parameters = {**config.rope_parameters, **scaling}
        if not config.architectures:  # GGUF stores no classes; all supported architectures are decoders
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(directory)
        GenerationConfig.from_model_config(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    (directory / MADE_FROM).write_text(str(file), encoding="utf-8", errors="replace")


def _rope_scaling(file: Path, config: PretrainedConfig) -> dict[str, Any]:
    """Return the rope scaling in the form of transformers' config; transformers itself ignores it.

    Raises ModelError for scaling that is not supported: the model would compute something else.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    scaling = f"{value('general.architecture')}.rope.scaling"
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    kind = value(f"{scaling}.type") or "linear"  # llama.cpp's default
    if factors is not None and (factors != 1).any():
        return _llama3_scaling(file, factors, config)
    factor, original = value(f"{scaling}.factor"), value(f"{scaling}.original_context_length")
    if factor is None:
        factor = value(f"{scaling.removesuffix('scaling')}scale_linear")  # its name in early files
    if kind == "none" or (kind == "linear" and not factor):  # llama.cpp reads 0 as 1
        return {}
    others = {key for key in reader.fields if key.startswith(f"{scaling}.")} - {f"{scaling}.{key}" for key in _SCALING}
    if kind == "linear" and not others:
        return {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn" and factor and original and not others:
        return {"rope_type": kind, "factor": float(factor), "original_max_position_embeddings": int(original)}
    found = ", ".join([f"type {kind}", *sorted(others)])
    raise ModelError(
        f"{file} scales its rotary frequencies in a way that is not supported ({found}); convert the model from its "
        f"original files."
    )


def _llama3_scaling(file: Path, factors: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return the parameters of Llama 3.1 that result in `factors` [head_dim / 2], the divisors of the frequencies.

    A GGUF file has only the factors. The formula is that of the Llama 3.1 release (`apply_scaling`).
    """
    import numpy as np

    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotations = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)  # radians per token
    frequencies = rotations / (2 * np.pi)
    kept = np.clip((original * frequencies - low) / (high - low), 0.0, 1.0)  # fraction of the original frequency
    if factors.shape != frequencies.shape or not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-3):
        raise ModelError(
            f"{file} divides its rotary frequencies by factors (rope_freqs.weight) that are not those of Llama 3.1, "
            f"which is not supported; convert the model from its original files."
        )
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
