"""Rejects files named in a model's files: transformers opens some of them anywhere, and none needs to be named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_shard.errors import ModelError


def refuse_named_files(path: Path, settings: Any) -> None:
    """Raise ModelError if a setting in a config or tokenizer file is the path of another file.

    Args:
        path: The file.
        settings: Its parsed content.
    """
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if (name := next(_path_values(key, value), None)) is not None:
            raise ModelError(
                f"{path} names the file {name!r} in its setting {key}; only files of {path.parent} are used, which are "
                f"found by their usual names. Remove it there."
            )


def _path_values(key: str, value: Any) -> Iterator[str]:
    """Yield the values that transformers uses as paths. It ignores the values of others, such as vocab_file."""
    if key in ("vocab", "merges"):
        yield from _texts([value])
    elif key == "init_inputs":
        yield from _texts(value)
    elif key in ("configuration_files", "fast_tokenizer_files"):
        yield from (name for name in _texts(value) if "/" in name)
    elif key.endswith("_kwargs") and isinstance(value, dict):  # of sentencepiece, MeCab, Sudachi
        yield from _texts([value.get("model_file")])
        yield from (text for text in _texts(list(value.values())) if "/" in text)


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
