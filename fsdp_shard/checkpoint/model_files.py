"""The files that belong to a model beside its weights: config, generation config, tokenizer, chat template, license.

They are copied byte for byte, but for the `dtype` in config.json, which says what was written. Those of a GGUF file are
the ones that `gguf_side` makes of its metadata; those of an adapter are its base's, but for a tokenizer of its own.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.io.files import has_file, member, read_json
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import NAME, side_directory

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.index import TensorIndex

CONFIG = "config.json"
# Names only: what else lies in the directory (a run's trainer state, an optimizer, other weights) stays behind.
_MODEL = (
    CONFIG,
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "*.py",  # modelling code that config.json may name in auto_map; nothing here runs it
    "LICENSE*",
    "NOTICE*",
)
_TEMPLATES = "additional_chat_templates"  # a directory: of models that have several, those that are not the usual one
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
    "*.spm",
    "spiece.model",
    "sentencepiece*",
    "tekken.json",
)


def names_in(root: Path) -> list[str]:
    """What lies in `root`; in place of a directory of chat templates, what lies in that."""
    found = [entry.name for entry in root.iterdir()]
    if (root / _TEMPLATES).is_dir():
        found.remove(_TEMPLATES)
        found += [f"{_TEMPLATES}/{entry.name}" for entry in (root / _TEMPLATES).iterdir()]
    return sorted(found)


def side_files(root: Path) -> list[str]:
    """The names of the files to carry along that lie in `root`, checked to stay inside it."""
    found = [name for name in names_in(root) if _is_one(name, (*_MODEL, *_TOKENIZER)) and has_file(root, name)]
    for name in found:
        member(root, name)
    return found


def has_tokenizer(root: Path) -> bool:
    """Whether a tokenizer lies in `root`: not its settings alone."""
    tokenizer = [name for name in side_files(root) if _is_one(name, _TOKENIZER)]
    return "tokenizer_config.json" in tokenizer and any(not _is_one(name, _TOKENIZER_SETTINGS) for name in tokenizer)


def carried_names(index: TensorIndex) -> list[str]:
    """The names of the files that `carry` puts beside the weights."""
    return sorted(_carried(index))


def side_bytes(index: TensorIndex) -> int:
    """Bytes of the files to carry along, 0 where they have to be made first."""
    return 0 if index.format == NAME else sum(path.stat().st_size for path in _carried(index).values())


def carry(index: TensorIndex, target: Path, dtype: str | None) -> list[str]:
    """Put the side files of `index` into `target`; returns the names of all files that are in it then.

    `dtype` (torch's name, such as `bfloat16`) is what config.json shall say; None leaves it as it is.
    """
    for name, path in _carried(index).items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(path.read_bytes())
    if dtype is not None and has_file(target, CONFIG):
        _set_dtype(target / CONFIG, dtype)
    return [str(entry.relative_to(target)) for entry in sorted(target.rglob("*")) if entry.is_file()]


def _carried(index: TensorIndex) -> dict[str, Path]:
    """The files to carry along, by name."""
    root = index.side or index.root
    if index.format == NAME:
        root = side_directory(index.root / index.metadata["file"])
    found = {name: root / name for name in side_files(root)}
    if (place := index.own_tokenizer) is None:
        return found
    # All of it: a template of the one with the tokens of the other would be neither.
    own = {name: place / name for name in side_files(place) if _is_one(name, _TOKENIZER)}
    return {name: path for name, path in found.items() if not _is_one(name, _TOKENIZER)} | own


def _is_one(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _set_dtype(path: Path, dtype: str) -> None:
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object, so it is no model's config.")
    if _with_dtype(config, dtype) != config:
        path.write_text(json.dumps(_with_dtype(config, dtype), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A copy that says `dtype`, also in the configs of parts (`text_config`, ...) that say one."""
    copy = dict(config)
    copy["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype
    if "torch_dtype" in config:
        copy["torch_dtype"] = dtype
    for name, part in config.items():
        is_model = name.endswith("_config") and name != "quantization_config" and isinstance(part, dict)
        if is_model and ("dtype" in part or "torch_dtype" in part):
            copy[name] = _with_dtype(part, dtype)
    return copy
