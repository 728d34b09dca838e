"""The model files: a model's files other than weights, such as config, tokenizer, chat template and license.

They are copied byte for byte, except for the `dtype` in config.json, which records the written dtype, and for the
settings of a quantization, which are left out for plain weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.io.members import has_file, member
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import atomic_directory, matches_any, read_bounded, read_json, user_cache

CONFIG = "config.json"
# Entries of config.json that a classifier's new head changes.
CLASSIFIER_ENTRIES = frozenset({"architectures", "id2label", "label2id", "pad_token_id"})
# How to decode the weights of optimum-quanto, ModelOpt, AutoGPTQ, AutoAWQ and auto-round, which look for it there.
_QUANTIZATION = (
    "quanto_qmap.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
# Other files (a trainer's state, an optimizer, other weights) are not copied.
_SETTINGS = (
    CONFIG,
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    *_QUANTIZATION,
)
_MODEL = (*_SETTINGS, "LICENSE*", "NOTICE*")
_TEMPLATES = "additional_chat_templates"  # a directory: the templates other than the default one
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    f"{_TEMPLATES}/*.jinja",
)
_TOKENIZER = (
    *_TOKENIZER_SETTINGS,
    "tokenizer*",
    "vocab.*",
    "vocab-*.json",  # FSMT
    "target_vocab.json",  # Marian
    "entity_vocab.json",  # LUKE
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "spm*.model",
    "prophetnet.tokenizer",
    "normalizer.json",
    "emoji.json",
    "byte_maps.json",
    "word_shape.json",
    "word_pronunciation.json",
    "*.tiktoken",
    "tiktoken.model",
    "*.spm",
    "spiece.model",
    "sentencepiece*",
    "tekken.json",
)


def read_config(directory: Path) -> Mapping[str, Any]:
    """Return the parsed config.json in a directory; empty if there is none, or it is not an object."""
    config = read_json(member(directory, CONFIG)) if has_file(directory, CONFIG) else {}
    return config if isinstance(config, Mapping) else {}


def list_files(root: Path) -> list[str]:
    """List the names in a directory, sorted; a directory of chat templates is replaced by its files."""
    names = [entry.name for entry in root.iterdir()]
    if (root / _TEMPLATES).is_dir():
        names.remove(_TEMPLATES)
        names += [f"{_TEMPLATES}/{entry.name}" for entry in (root / _TEMPLATES).iterdir()]
    return sorted(names)


def has_quantization_file(root: Path) -> bool:
    """Return whether a directory has a file that describes quantized weights, besides config.json."""
    return any(has_file(root, name) for name in _QUANTIZATION)


def list_model_files(root: Path) -> dict[str, Path]:
    """Find the model files in a directory; without a config.json, only those of a tokenizer.

    Code is included if a config names some in its `auto_map`; it is copied and never run.

    Returns:
        Name -> path.

    Raises:
        CheckpointError: A file is a link out of the directory, or a config is too large.
    """
    patterns = [*_TOKENIZER, *(_MODEL if has_file(root, CONFIG) else ())]
    names = [name for name in list_files(root) if matches_any(name, patterns) and has_file(root, name)]
    files = {name: member(root, name) for name in names if not name.endswith(".py")}
    # Weights may lie among the user's scripts, which are not the model's.
    configs = [path for name, path in files.items() if name.endswith("config.json")]
    if any(b'"auto_map"' in read_bounded(path, "config_bytes") for path in configs):
        files |= {
            name: member(root, name) for name in list_files(root) if name.endswith(".py") and has_file(root, name)
        }
    return files


def is_model_file(name: str) -> bool:
    """Return whether a file of this name is a model file."""
    return matches_any(name, (*_MODEL, *_TOKENIZER))


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of this name, relative to the model's directory, belongs to a tokenizer."""
    return matches_any(name, _TOKENIZER) and ("/" not in name or matches_any(name, (f"{_TEMPLATES}/*.jinja",)))


def is_settings_file(name: str) -> bool:
    """Return whether a file of this name holds settings of a model, its generation or its processor."""
    return name in _SETTINGS


def has_tokenizer(root: Path) -> bool:
    """Return whether a directory has a tokenizer, not only settings of one."""
    names = [name for name in list_model_files(root) if matches_any(name, _TOKENIZER)]
    return "tokenizer_config.json" in names and any(not matches_any(name, _TOKENIZER_SETTINGS) for name in names)


def replace_tokenizer(files: Mapping[str, Path], others: Mapping[str, Path]) -> dict[str, Path]:
    """Return `files` with the whole tokenizer of `others`: templates and tokens of different ones do not match."""
    kept = {name: path for name, path in files.items() if not matches_any(name, _TOKENIZER)}
    return kept | {name: path for name, path in others.items() if matches_any(name, _TOKENIZER)}


def set_chat_template(
    files: Mapping[str, bytes], template: str, name: str | None, *, tokenizer_only: bool = False
) -> dict[str, bytes]:
    """Replace all chat templates of a tokenizer by one.

    Args:
        files: File name -> content of the model files.
        template: The default template of the result.
        name: The template's other name, if it has one.
        tokenizer_only: Drop files that are not of the tokenizer.
    """
    chosen = [file for file in files if not tokenizer_only or matches_any(file, _TOKENIZER)]
    kept = {file: files[file] for file in chosen if not matches_any(file, ("chat_template*", f"{_TEMPLATES}/*"))}
    settings = json.loads(kept.get("tokenizer_config.json", "{}"))
    if settings.pop("chat_template", None) is not None:
        kept["tokenizer_config.json"] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    named = {f"{_TEMPLATES}/{name}.jinja": template.encode()} if name not in (None, "default") else {}
    return kept | {"chat_template.jinja": template.encode()} | named


def copy_model_files(
    files: Mapping[str, Path], target: Path, dtype: str | None, *, is_dequantized: bool = False
) -> list[str]:
    """Copy model files into a directory.

    Args:
        files: Name -> path.
        target: The directory.
        dtype: torch's name of the dtype to set in config.json; None keeps it.
        is_dequantized: Leave out the quantization settings, in config.json and in files of their own.

    Returns:
        The sorted names of all files that are now in the directory.

    Raises:
        CheckpointError: config.json is not a JSON object.
    """
    for name, path in files.items():
        if is_dequantized and name in _QUANTIZATION:
            continue
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(read_bounded(path, "tokenizer_bytes"))
    if dtype is not None and CONFIG in files:
        _change_config(files[CONFIG], target / CONFIG, dtype, is_dequantized=is_dequantized)
    return [str(entry.relative_to(target)) for entry in sorted(target.rglob("*")) if entry.is_file()]


def set_classes(content: bytes, entries: Mapping[str, Any]) -> bytes:
    """Return the content of a config.json with other `CLASSIFIER_ENTRIES`; CheckpointError if it is not a config."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG} is not a JSON object, so it is not the config of a model.")
    config.pop("num_labels", None)  # would be read instead of the names
    config.pop("problem_type", None)  # of the earlier head
    return (json.dumps(config | dict(entries), indent=2, ensure_ascii=False) + "\n").encode()


def classifier_directory(files: Mapping[str, Path], entries: Mapping[str, Any]) -> Path:
    """Make a directory in the user's cache with the model files of a classifier.

    Several processes may call this at the same time.

    Args:
        files: Those of the original model, by name.
        entries: The changed entries of its config.json.

    Raises:
        CheckpointError: There is no config, or the cache cannot be written.
    """
    contents = {name: read_bounded(path, "tokenizer_bytes") for name, path in sorted(files.items())}
    contents[CONFIG] = set_classes(contents.get(CONFIG, b""), entries)
    digest = xxhash.xxh3_128()
    for name, content in contents.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    target = user_cache("classifiers") / digest.hexdigest()
    if target.is_dir():
        return target
    try:
        with atomic_directory(target) as partial:
            for name, content in contents.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(content)
    except OSError as error:
        raise CheckpointError(
            f"The config of a classifier could not be written to {target.parent}: {error}. Set XDG_CACHE_HOME to a "
            f"directory that can be written."
        ) from error
    return target


def _change_config(source: Path, target: Path, dtype: str, *, is_dequantized: bool) -> None:
    config = read_json(source)
    if not isinstance(config, dict):
        raise CheckpointError(f"{source} is not a JSON object, so it is not the config of a model.")
    changed = with_dtype(config, dtype)
    if is_dequantized:
        changed = _without_quantization(changed)
    if changed != config:
        target.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a copy of a config with `dtype`, also in the configs of parts (`text_config`, ...) that have one."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    parts = {
        name: with_dtype(part, dtype)
        for name, part in config.items()
        if name.endswith("_config")
        and name != "quantization_config"
        and isinstance(part, dict)
        and part.keys() & {"dtype", "torch_dtype"}
    }
    return {**config, **dict.fromkeys(keys, dtype), **parts}


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without `quantization_config`, including that of part configs."""
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "quantization_config"
    }
