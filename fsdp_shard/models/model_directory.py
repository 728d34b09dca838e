"""Downloads a model directory from the Hugging Face hub, and checks its config and other files.

Imports no transformers.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_shard.errors import CheckpointError, ModelError
from fsdp_shard.models.named_files import refuse_named_files
from fsdp_shard.utils import exceeded, first_line, limits, matches_any, read_bounded, read_json, refuse_excess

# The files of a hub repository to download: no weights of other frameworks, and pickles only if there are no
# safetensors.
_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.spm", "*.codes", "*.tiktoken", "*.tokenizer")
_PICKLES = ("*.bin", "*.bin.index.json")
# Files that transformers reads as a whole, by the name of their size limit; and those among them that Python parses.
_SETTINGS = ("config.json", "generation_config.json", "*_config.json", "special_tokens_map.json", "added_tokens.json")
_READ_WHOLE = {
    "config_bytes": (*_SETTINGS, "chat_template*"),
    "tokenizer_bytes": (
        *("*.json", "*.model", "*.spm", "*.tiktoken", "*.tokenizer", "vocab*", "merges*", "*.codes", "dict.txt"),
    ),
}
_TEMPLATES = "additional_chat_templates"  # a directory, of which transformers reads all templates, too
_TOKENIZER_CONFIG, _TOKENIZER = "tokenizer_config.json", "tokenizer.json"
# Control and bidirectional characters in JSON, as escapes or in UTF-8.
_UNPRINTABLE = re.compile(rb"\\u00[0189]|\\u007f|\\u20[26]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81|\x7f", re.I)


def download_model(
    name: str,
    gguf_file: str | None,
    fetch_weights: bool,
    *,
    only_cached: bool = False,
    revision: str | None = None,
) -> Path:
    """Download a model from the hub; cached files are not downloaded again.

    Args:
        name: The hub id, org/name.
        gguf_file: A GGUF file to download instead of other weights.
        fetch_weights: Whether to download weights; config and tokenizer are always downloaded.
        only_cached: Use only the cache, without requests.
        revision: Branch, tag or commit; None for the default one.

    Returns:
        The snapshot in the hub's cache.

    Raises:
        ModelError: The model does not exist, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, revision=revision, local_files_only=only_cached)
    weights = [gguf_file] if gguf_file else ["*.safetensors"] if fetch_weights else []
    try:
        snapshot = Path(fetch(name, allow_patterns=[*_FILES, *weights]))
        if fetch_weights and not gguf_file and not any(snapshot.glob("*.safetensors")):
            files = [*_FILES, *_PICKLES]
            snapshot = Path(fetch(name, allow_patterns=files))
        return snapshot
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if only_cached:
            what = name if revision is None else f"{name}, revision {revision},"
            raise ModelError(f"{what} is neither a local directory nor in the hub's cache.") from error
        raise ModelError(
            f"{name} is neither a local checkpoint or directory nor a hub model that could be fetched: "
            f"{first_line(error)}"
        ) from error


def check_model_config(directory: Path) -> None:
    """Raise ModelError unless a directory has a config.json that names a model type."""
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(f"{directory} is not a model: it has no config.json; expected a Hugging Face model directory.")
    try:
        parsed = read_json(config)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelError(f"{config} has no model_type, so the architecture is unknown.")


def check_model_files(directory: Path) -> None:
    """Check the files that transformers reads, as it reads files of any kind and size itself.

    Args:
        directory: The directory of config or tokenizer.

    Raises:
        ModelError: A file is not regular or exceeds its limit, or it is JSON that is nested too deeply, has numbers or
            setting names that no tokenizer has, or names other files.
    """
    try:
        for name in _names(directory):
            if limit := next((limit for limit, patterns in _READ_WHOLE.items() if matches_any(name, patterns)), None):
                _check_file(directory / name, limit)
        if (templates := directory / _TEMPLATES).is_dir():
            for name in _names(templates):
                if name.endswith(".jinja"):
                    _check_file(templates / name, "config_bytes")
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error.strerror}.") from error


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, limits().directory_entries + 1)]
    refuse_excess(len(names), "directory_entries", f"{directory} has too many files to be a model")
    return names


def _check_file(path: Path, limit: str) -> None:
    try:
        state = path.stat()
    except OSError:  # a dangling link; reported when the file is needed
        return
    if stat.S_ISDIR(state.st_mode):
        return
    if not stat.S_ISREG(state.st_mode):
        raise ModelError(f"{path} is not a regular file, so it is not read.")
    refuse_excess(state.st_size, limit, f"{path} is too large to be read")
    if matches_any(path.name, _SETTINGS):
        document = read_json(path)
        refuse_named_files(path, document)
        if path.name == _TOKENIZER_CONFIG:
            if (large := next(_large_numbers(document), None)) is not None:
                raise ModelError(f"{path} has the number {large}: {exceeded('tokens')}.")
            _check_names(path, document)
    elif path.name == _TOKENIZER and _UNPRINTABLE.search(content := read_bounded(path, limit)):
        document = None
        with suppress(ValueError, RecursionError):  # reported when it is loaded
            document = json.loads(content)
        _check_names(path, document.get("added_tokens") if isinstance(document, dict) else None)


def _check_names(path: Path, settings: Any) -> None:
    """Reject names with characters that control a terminal: tokenizers prints unknown settings."""
    if (name := next(_unprintable_names(settings), None)) is not None:
        raise ModelError(f"{path} has a setting named {name[:100]}, which no tokenizer has.")


def _unprintable_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (name for name in value if not name.isprintable())
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _unprintable_names(item)


def _large_numbers(value: Any, key: str = "") -> Iterator[int]:
    """Yield integers too large for tokens, including keys, except lengths such as model_max_length."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _large_numbers(int(name) if name.isdecimal() and name.isascii() else None)
            yield from _large_numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _large_numbers(item, key)
    elif type(value) is int and value > limits().tokens and "len" not in key:
        yield value
