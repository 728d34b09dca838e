"""The base model of a run as its steps record it: enough to distinguish it from any other without its weights.

It is stored in a separate file of the step: earlier versions reject unknown entries of manifest.json and trainer.json,
but accept any file that the manifest lists.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from fsdp_shard.checkpoint.io import has_file, itemsize, member
from fsdp_shard.checkpoint.model_files import CLASSIFIER_ENTRIES, read_config
from fsdp_shard.errors import CheckpointError, InputError
from fsdp_shard.utils import json_digest, read_json

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.index import TensorIndex

BASE_MODEL, ADAPTER_BASE = "base_model.json", "adapter_base.json"  # of a whole model, of an adapter
TEACHER = "teacher.json"  # the same for the teacher of `objective=distill`
_TOKENIZER = "tokenizer.json"
_ELEMENTS = 1024
# Entries of config.json that do not change the model's output: files, classes, generation and programs. They vary
# between versions of transformers.
_NOT_COMPUTED = CLASSIFIER_ENTRIES | {
    *("transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map", "tokenizer_class", "num_labels"),
    *("bos_token_id", "eos_token_id", "sep_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix"),
    *("problem_type", "finetuning_task", "task_specific_params", "initializer_range", "quantization_config"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "torchscript"),
    *("attn_implementation", "gradient_checkpointing", "use_bfloat16", "pretraining_tp"),
}
_CLASSES = CLASSIFIER_ENTRIES - {"architectures"}  # of a classifier, they say which score is of which class and token


@dataclass(frozen=True)
class HeadChanges:
    """Changes that an adapter with a classifier's new head makes to its base beyond its tensors.

    Attributes:
        replaced: Names of stored tensors that the head replaces, and of others that the classifier lacks.
        config: The `CLASSIFIER_ENTRIES` of config.json.
    """

    replaced: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def classes(self) -> list[str]:
        """Class names, in order."""
        return class_names(self.config["id2label"])


def class_names(id2label: Mapping[Any, Any]) -> list[str]:
    """Return the class names in a config's `id2label`, in order."""
    return [str(name) for _, name in sorted(id2label.items(), key=lambda entry: int(entry[0]))]


@dataclass(frozen=True)
class BaseModel:
    """A run's base model: its path, its fingerprint, and how an adapter's run quantized it.

    `head` is set for an adapter with a new head. `adapter` is the fingerprint of the earlier adapter that the run began
    with, `adapter_path` its path. `config` is `computation` of its config, `vocabulary` that of its tokenizer. Both are
    None in steps of earlier versions; `vocabulary` also for whole models, whose steps contain the tokenizer.
    """

    path: str
    fingerprint: str
    quantize: str = "none"
    head: HeadChanges | None = None
    adapter: str | None = None
    adapter_path: str | None = None
    config: Mapping[str, Any] | None = None
    vocabulary: str | None = None

    def to_json(self) -> bytes:
        """Return the content of the file."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def fingerprint(index: TensorIndex) -> str:
    """Return a digest of the names, dtypes, shapes and first elements of all tensors."""
    digest = xxhash.xxh3_128()
    for name in sorted(index.names):
        entry = index.entry(name)
        count = min(entry.num_elements, _ELEMENTS)
        start = bytearray(count * itemsize(entry.dtype))
        index.read_into(name, 0, start)
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode() + start)
    return digest.hexdigest()


def is_base_model(index: TensorIndex, recorded: BaseModel, directory: Path) -> bool:
    """Return whether a model is the recorded one.

    Args:
        index: The model's stored weights.
        recorded: The model that a step or an adapter records.
        directory: The directory with the config of the model.
    """
    known = recorded.fingerprint
    return known == fingerprint(index) or known == _fingerprint_of_stacked(index, directory)


def computation(directory: Path) -> dict[str, Any] | None:
    """Return the entries of config.json in a directory that change what its model computes; None without one.

    For a classifier, these include its classes and its padding token, which determines where its head reads a text.
    """
    config = read_config(directory)
    is_classifier = "ForSequenceClassification" in str(config.get("architectures"))
    return _without(_NOT_COMPUTED - _CLASSES if is_classifier else _NOT_COMPUTED, config) if config else None


def _without(dropped: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config and of the configs in it, without some and without private ones."""
    kept = {key: value for key, value in values.items() if key not in dropped and not key.startswith("_")}
    return {key: _without(dropped, value) if isinstance(value, dict) else value for key, value in kept.items()}


def vocabulary(directory: Path) -> str | None:
    """Return a digest of the tokens and ids in a directory's tokenizer.json, the same for every version that writes it.

    Return None if there is no such file or no vocabulary in it.
    """
    if not has_file(directory, _TOKENIZER):
        return None
    try:
        values = read_json(member(directory, _TOKENIZER), "tokenizer_bytes")
        tokens = values["model"]["vocab"]
        if isinstance(tokens, list):  # a unigram model, with scores
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        tokens = {**tokens, **{added["content"]: added["id"] for added in values.get("added_tokens") or ()}}
    except (CheckpointError, KeyError, TypeError, ValueError):  # loading it reports what is wrong
        return None
    return json_digest(tokens)


def config_changes(recorded: BaseModel, directory: Path) -> list[str]:
    """Compare a model's config with the recorded one, entry by entry.

    Entries that only one of them has are ignored: versions of transformers add, omit and rename some.

    Args:
        recorded: The model that a step or an adapter records.
        directory: The directory with the config of the model.

    Returns:
        `name before -> now` for each entry that changes the computation; empty if nothing is recorded.
    """
    before, now = recorded.config, computation(directory)
    if before is None or now is None:
        return []
    if recorded.head is not None:  # it has classes and a padding token of its own
        before = _without(_CLASSES, before)
    return sorted(_differences(before, now, ""))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    before, now = _with_rotary(before), _with_rotary(now)
    for key in before.keys() & now.keys():
        was, value = before[key], now[key]
        if isinstance(was, dict) and isinstance(value, dict):
            yield from _differences(was, value, f"{prefix}{key}.")
        elif was != value:
            yield f"{prefix}{key} {json.dumps(was)} -> {json.dumps(value)}"


def _with_rotary(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config's values, with those of rotary embeddings under their names before transformers 5.

    `rope_scaling` is None without scaling; it is often added for longer texts.
    """
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # not a map per kind of layer
        apart = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        others = {key: value for key, value in values.items() if key != "rope_parameters"}
        scaling = {key: value for key, value in rope.items() if key not in apart}
        values = {**others, **apart, "rope_scaling": scaling}
    if "rope_theta" not in values:
        return values
    given = values.get("rope_scaling")
    if not isinstance(given, dict):
        return {"rope_scaling": None, **values}
    kind = given.get("rope_type", given.get("type", "default"))
    named = {"rope_type": kind} | {key: value for key, value in given.items() if key != "type"}
    return {**values, "rope_scaling": None if kind == "default" else named}


def _fingerprint_of_stacked(index: TensorIndex, directory: Path) -> str | None:
    """Return the fingerprint that older adapters recorded; None if the weights do not match the config.

    It is that of the tensors that transformers makes of the stored ones, with experts stacked.
    """
    from fsdp_shard.checkpoint.keys.matching import match_names
    from fsdp_shard.models import build_on_meta, load_config

    matched = replace(index, tensors=dict(index.tensors))  # the match changes it
    try:
        match_names(build_on_meta(load_config(directory)), matched)
        return fingerprint(matched)
    except InputError:
        return None
    finally:
        matched.reader.files.close()


def read_base_model(directory: Path, files: Sequence[str] = (ADAPTER_BASE, BASE_MODEL)) -> BaseModel | None:
    """Read the base model that a step, or an adapter copied from one, records.

    Args:
        directory: The step or the adapter.
        files: Possible names of the file; the first one found is read.

    Returns:
        The model; None if none is recorded, as by earlier versions and other programs.

    Raises:
        CheckpointError: The file is damaged.
    """
    name = next((name for name in files if has_file(directory, name)), None)
    if name is None:
        return None
    path = member(directory, name)
    document = read_json(path)
    if document == {}:  # an adapter made without loading a model
        return None
    values = document if isinstance(document, dict) else {}
    texts: list[Any] = [values.get("path"), values.get("fingerprint"), values.get("quantize", "none")]
    adapter, where = values.get("adapter"), values.get("adapter_path")
    tokens = values.get("vocabulary")
    if not all(isinstance(text, str) for text in [*texts, adapter or "", where or "", tokens or ""]):
        raise CheckpointError(f"{path} is damaged: it must have the path and the fingerprint of a model, as text.")
    config = values.get("config")
    if not isinstance(config, dict | None):
        raise CheckpointError(f"{path} is damaged: config must have entries of a config.json.")
    head = values.get("head")
    changes = None if head is None else _head_of(path, head)
    found = replace(BaseModel(*texts), head=changes, adapter=adapter, adapter_path=where, config=config)
    return replace(found, vocabulary=tokens)


def _head_of(path: Path, value: Any) -> HeadChanges:
    found = value if isinstance(value, dict) else {}
    replaced, config = found.get("replaced"), found.get("config")
    names = [name for name in replaced if isinstance(name, str)] if isinstance(replaced, list) else None
    if names is None or names != replaced or not isinstance(config, dict) or not _is_classifier(config):
        raise CheckpointError(
            f"{path} is damaged: head must have the names of tensors in replaced, and in config the entries "
            f"{', '.join(sorted(CLASSIFIER_ENTRIES))} of a classifier."
        )
    return HeadChanges(tuple(names), config)


def _is_classifier(config: dict[str, Any]) -> bool:
    """Return whether config entries name the model class, its labels and its padding token."""
    if config.keys() != CLASSIFIER_ENTRIES:
        return False
    architectures, names, padding = config["architectures"], config["id2label"], config["pad_token_id"]
    if not (isinstance(names, dict) and isinstance(architectures, list) and len(architectures) == 1):
        return False
    is_numbered = list(names) == [str(number) for number in range(len(names))]
    are_texts = all(isinstance(name, str) for name in (*architectures, *names.values()))
    is_token = padding is None or (type(padding) is int and 0 <= padding < 1 << 31)
    inverse = {name: int(number) for number, name in names.items()} if is_numbered and are_texts else None
    return inverse is not None and config["label2id"] == inverse and is_token
