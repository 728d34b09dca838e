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

from fsdp_shard.errors import ModelError
from fsdp_shard.user_cache import user_cache

NAME = "gguf"  # of the format; here, so that who only asks whether a checkpoint is of it loads no more than this
_FORMAT = 1  # changed when what is written changes


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

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, ImportError, TypeError, NotImplementedError) as error:  # all that it does not know
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file} cannot be used as a model: {reason}") from error
    if not config.architectures:  # GGUF knows no classes; the architectures that can be read are decoder-only models
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
