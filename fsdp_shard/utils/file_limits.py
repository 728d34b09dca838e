"""Limits for untrusted files: bytes, numbers, seconds. The largest existing models stay far below them.

`FSDP_SHARD_LIMITS="metadata_bytes=2GB,render_seconds=10"` changes them, for this process and its children.
"""

import os
from dataclasses import dataclass, fields, replace
from functools import cache

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.utils.text import format_size, nearest, parse_size

VARIABLE = "FSDP_SHARD_LIMITS"


@dataclass(frozen=True)
class Limits:
    """The limits; names that end in `_bytes` are sizes, those in `_seconds` processor time, and all others numbers.

    Attributes:
        metadata_bytes: Files that describe tensors (an index, a manifest, a pickle, a header), and metrics logs.
        config_bytes: Any other small file, such as config.json, trainer.json or a chat template.
        settings_bytes: The settings of a run, in YAML.
        tokenizer_bytes: Any file of a model other than its weights, such as tokenizer.json.
        nesting: Depth of JSON.
        tensors: Tensors in one file.
        array_items: Strings in an array of a GGUF file, such as the tokens of its tokenizer.
        tokens: Integers in tokenizer_config.json, which are token counts or ids.
        mesh_ranks: Ranks over which a tensor is sharded.
        directory_entries: Files in a checkpoint directory.
        view_bytes: Total size of the tensors in a torch.save checkpoint beyond its file size, as such files can store
            one number as a tensor of any shape.
        buffer_bytes: Buffers that a model computes when it is loaded, such as masks.
        build_seconds, build_bytes: Reading a model's config and building it without its weights; matching the patterns
            in an adapter's config.
        render_seconds, render_bytes: Rendering a chat template and tokenizing, each time, and again for 32 KiB of text;
            reading the recorded settings of a run.
    """

    metadata_bytes: int = 1 << 30
    config_bytes: int = 16 << 20
    settings_bytes: int = 128 << 10
    tokenizer_bytes: int = 256 << 20
    nesting: int = 64
    tensors: int = 500_000
    array_items: int = 4_000_000
    tokens: int = 2_000_000
    mesh_ranks: int = 1 << 17
    directory_entries: int = 100_000
    view_bytes: int = 64 << 20
    buffer_bytes: int = 256 << 20
    build_seconds: float = 1.2
    build_bytes: int = 128 << 20
    render_seconds: float = 0.7
    render_bytes: int = 128 << 20


def limits() -> Limits:
    """Return the limits of this process; raise ConfigError if FSDP_SHARD_LIMITS has a wrong name or value."""
    return _parse(os.environ.get(VARIABLE, ""))


def refuse_excess(value: float, name: str, what: str) -> None:
    """Raise CheckpointError if `value` exceeds the limit `name`; `what` begins the message."""
    if value > getattr(limits(), name):
        raise CheckpointError(f"{what}: {exceeded(name)}.")


def exceeded(name: str) -> str:
    """The end of an error message: this limit is exceeded, and how to raise it."""
    value = getattr(limits(), name)
    shown = format_size(value) if name.endswith("_bytes") else f"{value:,g} s" if _is_seconds(name) else f"{value:,}"
    return f"the limit is {shown}; if the file is right, raise it by {VARIABLE}={name}=VALUE"


@cache
def _parse(text: str) -> Limits:
    known = [field.name for field in fields(Limits)]
    changed: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ConfigError(
                f"{VARIABLE}: {name} is not a limit{nearest(name, known)}; limits are {', '.join(known)}."
            )
        changed[name] = _value(name, value)
    return replace(Limits(), **changed)  # type: ignore[arg-type]  # each value has the type of its field


def _value(name: str, value: str) -> float:
    if name.endswith("_bytes"):
        return parse_size(value, f"{VARIABLE}: {name}")
    try:
        number = float(value) if _is_seconds(name) else int(value.replace("_", ""))
    except ValueError:
        number = 0
    if not 0 < number < 1 << 62:
        kind = "seconds, such as 10" if _is_seconds(name) else "a whole number above 0"
        raise ConfigError(f"{VARIABLE}: {name}={value} is wrong; write {kind}.")
    return number


def _is_seconds(name: str) -> bool:
    return name.endswith("_seconds")
