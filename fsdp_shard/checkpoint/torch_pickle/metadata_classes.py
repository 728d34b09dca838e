"""Stand-ins for classes of torch, numpy and Python in a pickle: inert data holders that run no code.

The classes of DCP's metadata have checked fields; all others become a `Record` of the pickle's content. Sources:
torch.distributed.checkpoint.metadata, .filesystem and .planner, torch.distributed.device_mesh,
torch.distributed._shard, torch.distributed.tensor (2.13). None of these libraries is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, TypeVar

from fsdp_shard.checkpoint.torch_pickle.unpickler import StandIn

T = TypeVar("T")
_LIMIT = 1 << 63


class Constant(str):
    """A torch object that is only a name: `torch.float32`, `torch.strided`, `torch.FloatStorage`."""

    __slots__ = ()


class OrderedDict(dict[Any, Any], StandIn):
    """A dictionary of any kind. Attributes set on it (a state dict's `_metadata`) are dropped."""


class Record(StandIn):
    """An object of any class: `name` of the class or function, `arguments` of the call, and the `state` set later."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Accept a dictionary of attributes, (dictionary, slot attributes), or any state that the class expects."""
        if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, (dict, type(None))) for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state

    def get(self, name: str) -> Any:
        """The attribute `name`, or None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def record(name: str) -> Callable[..., Record]:
    """Return a constructor for the allow-list that keeps positional arguments and drops keywords."""
    return lambda *arguments, **keywords: Record(name, arguments)


def counts(value: Any, limit: int = 64) -> tuple[int, ...]:
    """`value` as a shape, offsets or strides: a flat tuple or list of at most `limit` integers >= 0, else TypeError."""
    if not isinstance(value, (tuple, list)) or len(value) > limit:
        raise TypeError("a shape is not a short tuple")
    for size in value:
        if type(size) is not int or not 0 <= size < _LIMIT:
            raise TypeError("a size, position or shape has something else than counts")
    return tuple(value)


def count(value: Any) -> int:
    """`value` as a size or position in bytes or elements, else TypeError."""
    return counts((value,))[0]


def instance_of(kind: type[T], value: Any) -> T:
    """`value` if it is a `kind`, else TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def text(value: Any) -> str:
    """`value` if it is a string, else TypeError."""
    return instance_of(str, value)


@cache
def _checks(cls: Any) -> Mapping[str, Callable[[Any], Any]]:
    return {item.name: item.metadata.get("check", lambda value: value) for item in fields(cls)}


class _Fields(StandIn):
    """Attributes by name, checked by `metadata["check"]` of their fields; those of a newer torch are dropped."""

    def set_state(self, state: Any) -> None:
        cls: Any = type(self)
        attributes = instance_of(dict, state)
        for name, check in _checks(cls).items():
            if name in attributes:
                setattr(self, name, check(attributes[name]))


@dataclass
class ChunkStorageMetadata(_Fields):
    """A box of a tensor: its offsets in the tensor and its shape."""

    offsets: tuple[int, ...] = field(default=(), metadata={"check": counts})
    sizes: tuple[int, ...] = field(default=(), metadata={"check": counts})


_FLOAT32 = Constant("torch.float32")


@dataclass
class TensorProperties(StandIn):
    """`dtype` is a constant such as `torch.bfloat16`; the other properties are deprecated in torch."""

    dtype: Constant = _FLOAT32

    def set_state(self, state: Any) -> None:
        """(dtype, layout, requires_grad, memory_format, pin_memory)."""
        dtype, *_ = instance_of(tuple, state)
        self.dtype = instance_of(Constant, dtype)


def _chunks(value: Any) -> list[ChunkStorageMetadata]:
    return [instance_of(ChunkStorageMetadata, chunk) for chunk in instance_of(list, value)]


@dataclass
class TensorStorageMetadata(_Fields):
    """A tensor of a DCP checkpoint."""

    properties: TensorProperties = field(
        default_factory=TensorProperties, metadata={"check": partial(instance_of, TensorProperties)}
    )
    size: tuple[int, ...] = field(default=(), metadata={"check": counts})
    chunks: Sequence[ChunkStorageMetadata] = field(default=(), metadata={"check": _chunks})


class BytesStorageMetadata(StandIn):
    """A non-tensor entry of a DCP checkpoint."""


def _optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else check(value)


@dataclass(unsafe_hash=True)
class MetadataIndex(_Fields):
    """The key of `Metadata.storage_data`: an entry and the offset of one of its chunks."""

    hashable = True
    fqn: str = field(default="", metadata={"check": text})
    offset: tuple[int, ...] | None = field(default=None, metadata={"check": _optional(counts)})
    index: int | None = field(default=None, hash=False, compare=False, metadata={"check": _optional(count)})


@dataclass
class StorageInfo(_Fields):
    """The bytes of a chunk: file, first byte, number of bytes, and their transformation (compression), if any."""

    relative_path: str = field(default="", metadata={"check": text})
    offset: int = field(default=0, metadata={"check": count})
    length: int = field(default=0, metadata={"check": count})
    transform_descriptors: Any = None


@dataclass
class Metadata(_Fields):
    """The part of a DCP checkpoint's `.metadata` that describes tensors."""

    state_dict_metadata: Mapping[str, Any] = field(default_factory=dict, metadata={"check": partial(instance_of, dict)})
    planner_data: Any = None
    storage_data: Any = None


_METADATA = Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex
DCP_CLASSES: dict[tuple[str, str], type[StandIn]] = {
    **{("torch.distributed.checkpoint.metadata", cls.__name__): cls for cls in _METADATA},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
}
"""The stand-ins with checked fields, by the (module, name) under which torch's writer puts them into a pickle."""
