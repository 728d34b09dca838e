"""The tensors in what torch.save wrote: out of nested dictionaries, with the weights told from the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdp_shard.checkpoint.index import Extra, TensorEntry
from fsdp_shard.checkpoint.io.dtypes import itemsize
from fsdp_shard.checkpoint.keys.wrapper_prefixes import Selection, split_state
from fsdp_shard.checkpoint.torch_pickle.dtensor import AnyTensor
from fsdp_shard.checkpoint.torch_pickle.torch_zip import StoredDTensor, StoredShards, StoredTensor, Unreadable
from fsdp_shard.errors import CheckpointError

_MAX_CONTAINERS = 200_000  # a pickle can name one list many times, in itself too: that is walked each time
_MAX_DEPTH = 24

TensorT = TypeVar("TensorT")


def weights_of(state: Any, where: Path) -> tuple[dict[str, AnyTensor], dict[str, Extra]]:
    """({FQN: tensor} of the weights in a (nested) state dict, the tensors beside them by kind)."""
    tensors: dict[str, tuple[tuple[str, ...], AnyTensor]] = {}
    for path, tensor in walk(state, where):
        name = ".".join(path)
        if name in tensors:
            raise CheckpointError(f"{where} holds two tensors under the name {name}; which one is meant?")
        tensors[name] = path, tensor
    try:
        selection = split_state({name: path for name, (path, _) in tensors.items()}) if tensors else Selection({}, {})
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if not selection.names:
        kinds = " and ".join(f"{len(names)} tensors of the kind {kind}" for kind, names in selection.extras.items())
        raise CheckpointError(f"{where} holds {kinds or 'no tensors at all'}, and no weights.")
    extras = {kind: extra_of([tensors[name][1] for name in names]) for kind, names in selection.extras.items()}
    return {fqn: tensors[name][1] for name, fqn in selection.names.items()}, extras


def walk(state: Any, where: Path) -> Iterator[tuple[tuple[str, ...], AnyTensor]]:
    """Every tensor with the keys that lead to it; CheckpointError where the nesting has no end."""
    seen, stack = 0, [((), state)]  # type: tuple[int, list[tuple[tuple[str, ...], Any]]]
    while stack:
        path, value = stack.pop()
        if isinstance(value, AnyTensor):
            yield path or ("tensor",), value
        elif isinstance(value, (dict, list, tuple)):
            seen += 1
            if seen > _MAX_CONTAINERS or len(path) > _MAX_DEPTH:
                raise CheckpointError(f"{where} is nested in itself, or deeper than any state dict.")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += reversed([((*path, str(key)), item) for key, item in items if _may_hold_tensors(item)])


def _may_hold_tensors(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, StoredTensor, StoredDTensor, StoredShards, Unreadable))


def readable(tensor: TensorT | Unreadable, name: str, where: Path) -> TensorT:
    """The tensor, unless it has no plain bytes."""
    if isinstance(tensor, Unreadable):
        raise CheckpointError(f"{where}: tensor {name} {tensor.problem}.")
    return tensor


def extra_of(tensors: Sequence[AnyTensor]) -> Extra:
    """How many, and the bytes of those parts of them that lie in this file."""
    return Extra(len(tensors), sum(map(_num_bytes, tensors)))


def added(extras: Mapping[str, Extra], more: Mapping[str, Extra]) -> dict[str, Extra]:
    """The extras of two files together."""
    none = Extra(0, 0)
    both = {kind: (extras.get(kind, none), more.get(kind, none)) for kind in (*extras, *more)}
    return {kind: Extra(a.num_tensors + b.num_tensors, a.num_bytes + b.num_bytes) for kind, (a, b) in both.items()}


def _num_bytes(tensor: AnyTensor) -> int:
    if isinstance(tensor, StoredDTensor):
        return _num_bytes(tensor.local)
    if isinstance(tensor, StoredShards):
        return sum(_num_bytes(shard) for _, shard in tensor.shards)
    return tensor.num_elements * itemsize(tensor.dtype) if isinstance(tensor, StoredTensor) else 0


def without_copies(found: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors that lie in the very same bytes are tied: (each once, under its first name; {alias: that name})."""
    kept: dict[str, TensorEntry] = {}
    owners: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, entry in found.items():
        owner = owners.setdefault((entry.dtype, entry.shape, entry.pieces), name) if entry.pieces else name
        if owner == name:
            kept[name] = entry
        else:
            aliases[name] = owner
    return kept, aliases
