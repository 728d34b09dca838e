"""Finds what loading would reject: compares tensors with the model of config.json, and adapters with settings and base.

transformers builds the model on the meta device, and the loading code matches it, so `verify` reports the same about
names, shapes and kinds of numbers as loading. Nothing is downloaded, and no model code is run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.adapters.adapter_checks import QuantizedBaseError, check_adapter
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.scan import scan
from fsdp_shard.checkpoint.integrity.verify_report import ByteRange, Problem
from fsdp_shard.checkpoint.io import member
from fsdp_shard.checkpoint.keys.quantized_weights import quantization
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.checkpoint.model_files import CONFIG
from fsdp_shard.errors import CheckpointError, InputError, ModelError
from fsdp_shard.utils import first_few, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBERED = re.compile(r"(?P<list>.+?)\.(?P<number>\d+)\.")


def compare_with_config(index: TensorIndex, directory: Path) -> tuple[list[Problem], list[str]]:
    """Compare the tensors of a model with the config.json in a directory.

    Returns:
        Problems, and lines about tensors that were not compared or are not used.
    """
    path = directory / CONFIG
    if (method := quantization(index)) is not None:
        return [], [f"not compared with {path}: the weights are quantized ({method})"]
    try:
        config = read_json(member(directory, CONFIG))
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} is not a JSON object, so it is not the config of a model.")
        model = _model(directory, config)
    except (CheckpointError, ModelError) as error:
        return [Problem(str(error), (ByteRange(CONFIG),))], []
    if model is None:
        return [], [f"not compared with {path}: its model type is not one of transformers, or has code of its own"]
    from fsdp_shard.checkpoint.keys.matching import match_names, untie

    with replace(index, tensors=dict(index.tensors), aliases=dict(index.aliases), parts=(), notes=()) as copied:
        try:
            untie(model, copied)
            unused = match_names(model, copied).unused
        except CheckpointError as error:
            return [Problem(str(error), (ByteRange(CONFIG),))], []
    further = [] if _predicts_further(config) else list(_further_layers(unused, model.state_dict(keep_vars=True)))
    problems = [Problem(f"{path} does not fit the weights: {text}", (ByteRange(CONFIG),)) for text in further[:1]]
    return problems, [f"not in the model of {path}: {first_few(unused)}"] if unused and not problems else []


def _model(directory: Path, config: Mapping[str, Any]) -> PreTrainedModel | None:
    """Build the model of a config on meta; return None if transformers alone cannot."""
    from transformers import CONFIG_MAPPING

    from fsdp_shard.models import build_on_meta, load_config

    kind = config.get("model_type", "")
    if "auto_map" in config or (isinstance(kind, str) and kind not in CONFIG_MAPPING):
        return None
    return build_on_meta(load_config(directory), "float32")


def model_of_config(directory: Path) -> PreTrainedModel | None:
    """Build the model of the config.json in a directory on meta; return None if transformers alone cannot."""
    config = read_json(member(directory, CONFIG))
    return _model(directory, config) if isinstance(config, dict) else None


def _predicts_further(config: Mapping[str, Any]) -> bool:
    """Whether layers after the last one predict further tokens (multi-token prediction), which transformers skips."""
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    return any(re.search(r"nextn|mtp", key) for part in parts for key in part)


def _further_layers(unused: Collection[str], used: Collection[str]) -> Iterator[str]:
    """Describe unused layers in lists of which the model uses other layers."""
    numbers: dict[str, set[int]] = {}
    for name in used:
        if match := _NUMBERED.match(name):
            numbers.setdefault(match["list"], set()).add(int(match["number"]))
    for name in unused:
        match = _NUMBERED.match(name)
        if match and match["list"] in numbers and int(match["number"]) not in numbers[match["list"]]:
            count = len(numbers[match["list"]])
            yield f"it gives {match['list']} {count} layers, and there is {match['list']}.{match['number']}."


def compare_with_base(location: Location, index: TensorIndex) -> tuple[list[Problem], list[str]]:
    """Compare an adapter with its settings and, if the base is a local directory, with its base.

    The adapted weights are read and merged, as finite values may become infinite. The base is not checked otherwise.

    Returns:
        Problems, and lines about anything that was not compared.
    """
    try:
        check_adapter(index)
        base = location.base_path or peft.base_of(index.root)
    except CheckpointError as error:
        return [Problem(str(error))], []
    if not _is_directory(base):
        return [], [f"not compared with its base model: {base} is not a directory on this machine"]
    try:
        with location.model_index as merged:
            problems = [Problem(note) for note in merged.notes]
            changed = [name for name, entry in merged.tensors.items() if location.base.index.tensors.get(name) != entry]
            scan(merged, changed, ())  # reading them merges them: only its errors count
            found, notes = compare_with_config(merged, location.expected_config_directory)
    except QuantizedBaseError as error:
        return [], [f"not compared with its base model: {error}"]
    except (InputError, OSError) as error:
        return [Problem(str(error))], []
    return problems + found, notes


def _is_directory(path: str) -> bool:
    """Whether this is a directory; False if the system rejects the name."""
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, RuntimeError):
        return False
