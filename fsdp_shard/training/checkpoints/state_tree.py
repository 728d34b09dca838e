"""The state of users' objects, such as the `state_dict()` of a scheduler or a GradScaler, as JSON and named tensors.

Only data is stored. Nothing is pickled, so reading a state runs no code.

JSON has no tuples, bytes, NaN, or non-string keys; objects with one key that begins with `$` represent them.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from fsdp_shard.checkpoint import find_torch_name, is_module_path
from fsdp_shard.errors import CheckpointError, SaveError

_DICTS = (dict, OrderedDict, defaultdict)
_MAX_DEPTH = 100
_Add = Callable[[str, torch.Tensor], str]  # adds a tensor under a name; returns the name that it was stored under


def flatten_state(state: Any, name: str, taken: Container[str] = ()) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state into a JSON document and its tensors.

    Args:
        state: None, bool, int, float, str, bytes, tensors, and lists, tuples, dicts and Counters of them.
        name: Name of the state in errors, and prefix of its tensors' names.
        taken: Names that are not available for its tensors.

    Returns:
        The document, in which each tensor is its name, and the tensors by name.

    Raises:
        SaveError: A value has another type; the message names its key.
    """
    tensors: dict[str, torch.Tensor] = {}

    def add(key: str, tensor: torch.Tensor) -> str:
        while key in tensors or key in taken:  # {"a": {"b": x}, "a.b": y}
            key += "~"
        if not is_module_path(key):
            raise SaveError(
                f"{_shown_name(key)[:100]}... is a tensor whose keys, joined by dots, have {len(key):,} characters and "
                f"{key.count('.')} dots, with which it could not be read again; shorten them."
            )
        tensors[key] = tensor
        return key

    return _encode(state, name, add, 0), tensors


def _encode(value: Any, name: str, add: _Add, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise SaveError(f"{_shown_name(name)} is nested more than {_MAX_DEPTH} levels deep, or contains itself.")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.is_nested or value.layout is not torch.strided:
            found = "on the meta device" if value.is_meta else "nested" if value.is_nested else "sparse"
            raise SaveError(
                f"{_shown_name(name)} is a tensor that is {found}, which cannot be saved: give a dense one."
            )
        if find_torch_name(str(value.dtype)) is None:
            raise SaveError(
                f"{_shown_name(name)} is a tensor of {value.dtype}, which safetensors files cannot hold; cast it."
            )
        return {"$tensor": add(name, value)}
    if kind in (list, tuple):
        items = [_encode(item, f"{name}.{number}", add, depth + 1) for number, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is Counter:
        return {"$counter": _pairs(value, name, add, depth)}
    if kind in _DICTS:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{name}.{key}", add, depth + 1) for key, item in value.items()}
        return {"$dict": _pairs(value, name, add, depth)}
    raise SaveError(
        f"{_shown_name(name)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored as data; use "
        f"tensors, None, bool, int, float, str, bytes, and lists, tuples and dicts of these."
    )


def _pairs(value: Mapping[Any, Any], name: str, add: _Add, depth: int) -> list[list[Any]]:
    for key in value:
        if not (key is None or type(key) in (bool, int, float, str)):
            raise SaveError(
                f"{_shown_name(name)} has the key {key!r} of type {type(key).__name__}; keys may be strings, numbers, "
                f"None."
            )
    return [
        [_encode(key, name, add, depth + 1), _encode(item, f"{name}.{key}", add, depth + 1)]
        for key, item in value.items()
    ]


def _shown_name(name: str) -> str:
    """A name as shown to users, without the mark that tensor names begin with."""
    return name.removeprefix("$")


def restore_state(document: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """Rebuild a state that `flatten_state` has split.

    Args:
        document: The document.
        tensors: The tensors by name.
        where: The file, for errors.

    Raises:
        CheckpointError: `flatten_state` cannot have made the document.
    """
    try:
        return _decode(document, tensors, 0)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{where} is damaged: it holds state that cannot be read ({error!r}).") from error


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
        return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
    content = value[mark]
    match mark:
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$tensor":
            return tensors[content]
        case "$tuple":
            return tuple(_decode(content, tensors, depth + 1))
        case "$dict" | "$counter":
            decoded = {_decode(key, tensors, depth + 1): _decode(item, tensors, depth + 1) for key, item in content}
            return Counter(decoded) if mark == "$counter" else decoded
        case _:
            raise ValueError(f"unknown mark {mark!r}")
