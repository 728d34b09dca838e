"""The directory of a model: downloading it from the Hugging Face hub, and checking that it has a config.

Imports no transformers.
"""

import json
from pathlib import Path

from fsdp_shard.errors import ModelError
from fsdp_shard.utils import first_line

# The files of a hub repository to download: no weights of other frameworks, and pickles only without safetensors.
_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.spm", "*.codes", "*.tiktoken", "*.tokenizer")
_PICKLES = ("*.bin", "*.bin.index.json")


def download_model(
    name: str, gguf_file: str | None = None, fetch_weights: bool = True, *, only_cached: bool = False
) -> Path:
    """Download a model from the hub; what is in its cache already is not downloaded again.

    Args:
        name: The hub id, org/name.
        gguf_file: A GGUF file to download instead of other weights.
        fetch_weights: Whether to download weights; config and tokenizer are always downloaded.
        only_cached: Make no request.

    Returns:
        The snapshot in the hub's cache.

    Raises:
        ModelError: There is no such model, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    weights = [gguf_file] if gguf_file else ["*.safetensors"] if fetch_weights else []
    try:
        snapshot = Path(snapshot_download(name, allow_patterns=[*_FILES, *weights], local_files_only=only_cached))
        if fetch_weights and not gguf_file and not any(snapshot.glob("*.safetensors")):
            files = [*_FILES, *_PICKLES]
            snapshot = Path(snapshot_download(name, allow_patterns=files, local_files_only=only_cached))
        return snapshot
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if only_cached:
            raise ModelError(f"{name} is neither a local directory nor in the hub's cache.") from error
        raise ModelError(
            f"{name} is neither a local directory nor a hub model that could be fetched: {first_line(error)}"
        ) from error


def check_model_config(directory: Path) -> None:
    """Raise ModelError unless a directory has a config.json that names a model type."""
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(f"{directory} is not a model: it has no config.json; expected a Hugging Face model directory.")
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelError(f"{config} has no model_type, so the architecture is unknown.")
