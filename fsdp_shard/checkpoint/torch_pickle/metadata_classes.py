"""What takes the place of torch's, numpy's and Python's own classes when a pickle is read: inert holders of data.

Imports none of those libraries. The classes of DCP's metadata have the fields that torch gives them, so that they can
be written again; all others are a `Record` of what the pickle says. Sources: torch.distributed.checkpoint.metadata,
.filesystem and .planner, torch.distributed.device_mesh, torch.distributed._shard, torch.distributed.tensor (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_shard.checkpoint.torch_pickle.unpickler import StandIn


class Constant(str):
    """An object of torch that only its name tells: `torch.float32`, `torch.strided`, `torch.FloatStorage`."""

    __slots__ = ()


class OrderedDict(dict[Any, Any], StandIn):
    """A dictionary of any kind. What is set on it as attributes (a state dict's `_metadata`) is dropped."""

    def set_state(self, state: Any) -> None:
        pass


class Record(StandIn):
    """An object of some class: `name` of the class or function, `arguments` that it was made with, and its `state`."""

    __slots__ = ("arguments", "keywords", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None) -> None:
        self.name, self.arguments, self.keywords = name, arguments, keywords or {}
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """A dictionary of attributes, or (that, attributes kept in slots), or whatever the class itself made of it."""
        if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, (dict, type(None))) for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state

    def get(self, name: str) -> Any:
        """The attribute `name`, or None if it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def record(name: str) -> Callable[..., Record]:
    """A constructor for the table: whatever it is called with is kept."""

    def make(*arguments: Any, **keywords: Any) -> Record:
        return Record(name, arguments, keywords)

    return make


_LIMIT = 1 << 63


def counts(value: Any, limit: int = 64) -> tuple[int, ...]:
    """`value` as a shape, offsets or strides: a flat, short sequence of whole numbers from 0 on, else TypeError."""
    if not isinstance(value, (tuple, list)) or len(value) > limit:
        raise TypeError("a shape is not a short tuple")
    for size in value:
        if type(size) is not int or not 0 <= size < _LIMIT:
            raise TypeError("a shape has something else than counts")
    return tuple(value)


def count(value: Any) -> int:
    """`value` as a size or position in bytes or elements, else TypeError."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise TypeError("a size or position is not a count")
    return value


def text(value: Any) -> str:
    """`value` if it is a string, else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} stands where there must be a text")
    return value


def _any(value: Any) -> Any:
    return value


@dataclass
class _Fields(StandIn):
    """Attributes by name, each with its own check; what a newer torch adds is left out."""

    checks: ClassVar[dict[str, Callable[[Any], Any]]]

    def set_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__} instead of attributes")
        for name, check in self.checks.items():
            if name in state:
                setattr(self, name, check(state[name]))


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _dictionary(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} stands where there must be a dictionary")
    return value


def _constant(value: Any) -> Constant:
    if not isinstance(value, Constant):
        raise TypeError(f"a {type(value).__name__} stands where there must be a dtype")
    return value


@dataclass
class ChunkStorageMetadata(_Fields):
    """A box of a tensor."""

    checks: ClassVar = {"offsets": counts, "sizes": counts}
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass
class MemFormat(StandIn):
    """`_MEM_FORMAT_ENCODING`: 0 contiguous, 1 channels last, 2 preserve."""

    value: int = 0


_FLOAT32, _STRIDED = Constant("torch.float32"), Constant("torch.strided")


@dataclass
class TensorProperties(StandIn):
    """`dtype` is the constant `torch.bfloat16` or the like; the other fields are deprecated in torch."""

    dtype: Constant = _FLOAT32
    layout: Constant = _STRIDED
    requires_grad: bool = False
    memory_format: MemFormat = field(default_factory=MemFormat)
    pin_memory: bool = False

    def set_state(self, state: Any) -> None:
        dtype, layout, requires_grad, memory_format, pin_memory = state
        self.dtype, self.layout = _constant(dtype), _constant(layout)
        self.requires_grad, self.pin_memory = bool(requires_grad), bool(pin_memory)
        if not isinstance(memory_format, MemFormat):
            raise TypeError("an unknown memory format")
        self.memory_format = memory_format


def _properties(value: Any) -> TensorProperties:
    if not isinstance(value, TensorProperties):
        raise TypeError(f"a {type(value).__name__} stands where there must be TensorProperties")
    return value


def _chunks(value: Any) -> list[ChunkStorageMetadata]:
    if not isinstance(value, list) or not all(isinstance(chunk, ChunkStorageMetadata) for chunk in value):
        raise TypeError("chunks are not a list of ChunkStorageMetadata")
    return value


@dataclass
class TensorStorageMetadata(_Fields):
    """A tensor of a DCP checkpoint."""

    checks: ClassVar = {"properties": _properties, "size": counts, "chunks": _chunks}
    properties: TensorProperties = field(default_factory=TensorProperties)
    size: tuple[int, ...] = ()
    chunks: list[ChunkStorageMetadata] = field(default_factory=list)


@dataclass
class BytesStorageMetadata(StandIn):
    """Something that is no tensor."""


@dataclass(unsafe_hash=True)
class MetadataIndex(_Fields):
    """The key of `Metadata.storage_data`: which chunk (by its offset) of which entry."""

    checks: ClassVar = {"fqn": text, "offset": _optional(counts), "index": _optional(count)}
    hashable = True
    fqn: str = ""
    offset: tuple[int, ...] | None = None
    index: int | None = field(default=None, hash=False, compare=False)


@dataclass
class StorageInfo(_Fields):
    """Where a chunk lies: file, first byte, number of bytes, and how the bytes were changed (compressed), if so."""

    checks: ClassVar = {"relative_path": text, "offset": count, "length": count, "transform_descriptors": _any}
    relative_path: str = ""
    offset: int = 0
    length: int = 0
    transform_descriptors: Any = None


@dataclass
class StorageMeta(_Fields):
    """Ids of the save."""

    checks: ClassVar = {"checkpoint_id": _any, "save_id": _any, "load_id": _any, "modules": _any}
    checkpoint_id: Any = None
    save_id: Any = None
    load_id: Any = None
    modules: Any = field(default_factory=list)


@dataclass
class Metadata(_Fields):
    """The `.metadata` of a DCP checkpoint."""

    checks: ClassVar = {
        "state_dict_metadata": _dictionary,
        "planner_data": _any,
        "storage_data": _any,
        "storage_meta": _any,
        "version": _any,
    }
    state_dict_metadata: dict[str, Any] = field(default_factory=dict)
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: Any = None


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
DCP_CLASSES: dict[tuple[str, str], type[StandIn]] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
    (_METADATA, "BytesStorageMetadata"): BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_METADATA, "TensorProperties"): TensorProperties,
    (_METADATA, "MetadataIndex"): MetadataIndex,
    (_METADATA, "StorageMeta"): StorageMeta,
    (_METADATA, "_MEM_FORMAT_ENCODING"): MemFormat,
    (_FILESYSTEM, "_StorageInfo"): StorageInfo,
}
"""Inverted, it says under which names a writer of DCP puts these classes into a pickle."""
