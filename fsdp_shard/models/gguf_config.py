"""Config, generation config and tokenizer of a GGUF file as the Hugging Face files that everything else reads.

A GGUF file carries them in its metadata, which takes transformers some 10 s to read for a vocabulary of 49,152 tokens,
and twice that as each is read on its own. So they are written out once, into a cache, by whoever comes first. Knows no
weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ModelError
from fsdp_shard.utils import user_cache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "gguf"  # of the format; here, so that who only asks whether a checkpoint is of it loads no more than this
_FORMAT = 2  # changed when what is written changes
_SCALING = ("type", "factor", "original_context_length", "finetuned")  # what is read of it, or says nothing


def side_directory(file: Path) -> Path:
    """A directory with config.json, generation_config.json and the tokenizer files of the GGUF file `file`.

    Raises ModelError when transformers cannot make them, or the cache cannot be written. Several processes may call
    this at once.
    """
    target = user_cache("gguf") / _key(file)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            _write_side_files(file, partial)
            if not target.is_dir():  # else another process was quicker
                os.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():
            raise ModelError(
                f"What {file} says of its model could not be written to {target.parent}: {error}. "
                f"Set XDG_CACHE_HOME to a directory that can be written."
            ) from error
    return target


def _key(file: Path) -> str:
    """Changes with the file, and with the version of transformers, which decides how it is read."""
    from importlib.metadata import version  # slow to import, and every command imports this module

    state = file.stat()
    parts = (str(file.resolve()), state.st_size, state.st_mtime_ns, version("transformers"), _FORMAT)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _write_side_files(file: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Alone in a directory: of one that has a tokenizer.json too, transformers would take that.
    (alone := directory / "alone").mkdir()
    (alone / file.name).symlink_to(file.resolve())
    try:
        config = AutoConfig.from_pretrained(alone, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
    except (ValueError, KeyError, ImportError, TypeError, NotImplementedError) as error:  # all that it does not know
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file} cannot be used as a model: {reason}") from error
    finally:
        shutil.rmtree(alone)
    if scaling := _rope_scaling(file, config):
        config.rope_parameters = {**config.rope_parameters, **scaling}
    if not config.architectures:  # GGUF knows no classes; the architectures that can be read are decoder-only models
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _rope_scaling(file: Path, config: PretrainedConfig) -> dict[str, Any]:
    """How rotary frequencies are changed for long texts, in transformers' words, which itself leaves it out.

    Raises ModelError where that cannot be said: the model would be another one.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    scaling = f"{value('general.architecture')}.rope.scaling"
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    kind = value(f"{scaling}.type")
    if factors is not None and (factors != 1).any():
        return _llama3_scaling(file, factors, config)
    factor, original = value(f"{scaling}.factor"), value(f"{scaling}.original_context_length")
    if kind in (None, "none") or (kind == "linear" and not factor):  # which llama.cpp takes for 1
        return {}
    others = {key for key in reader.fields if key.startswith(f"{scaling}.")} - {f"{scaling}.{key}" for key in _SCALING}
    if kind == "linear" and not others:
        return {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn" and factor and original and not others:
        return {"rope_type": kind, "factor": float(factor), "original_max_position_embeddings": int(original)}
    told = ", ".join([f"type {kind}", *sorted(others)])
    raise ModelError(
        f"{file} scales its rotary frequencies in a way that is not known here ({told}); convert the model from its "
        f"original files."
    )


def _llama3_scaling(file: Path, factors: Any, config: PretrainedConfig) -> dict[str, Any]:
    """The parameters that give what frequencies are divided by, `factors` [head_dim / 2]: a GGUF file has only those.

    As Llama 3.1 and later have them; the formula is that of the Llama 3.1 release (`apply_scaling`).
    """
    import numpy as np

    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turns = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # per token
    share = np.clip((original * turns - low) / (high - low), 0.0, 1.0)  # of the frequency as it is
    if factors.shape != turns.shape or not np.allclose(factors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise ModelError(
            f"{file} divides its rotary frequencies by factors (rope_freqs.weight) that are not those of Llama 3.1, "
            f"and what they come from is not in it; convert the model from its original files."
        )
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
