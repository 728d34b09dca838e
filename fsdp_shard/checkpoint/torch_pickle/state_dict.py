"""Finds the tensors in nested dictionaries of torch.save, and the weights among them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.io import itemsize
from fsdp_shard.checkpoint.keys.wrapper_prefixes import OTHER, Selection, split_state
from fsdp_shard.checkpoint.tensor_entry import Extra, TensorEntry
from fsdp_shard.checkpoint.torch_pickle.dtensor import AnyTensor, StoredDTensor, StoredShards
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import Record
from fsdp_shard.checkpoint.torch_pickle.strided import piece_of
from fsdp_shard.checkpoint.torch_pickle.tensor import StoredTensor, Unreadable
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count, format_size, refuse_excess

_MAX_CONTAINERS, _MAX_DEPTH = 100_000, 24
_EXTENTS_PER_BYTE = 64  # slices of a large tensor are each read from the first to the last element
_WALKED = (dict, list, tuple, AnyTensor)
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_ARRAYS = frozenset(f"{module}.{name}" for module in _MODULES for name in ("_reconstruct", "_frombuffer"))


def weights_of(state: Any, where: Path) -> tuple[dict[str, AnyTensor], dict[str, Extra]]:
    """Split a (nested) state dict into ({FQN: tensor} of the weights, the other tensors and numpy's arrays by kind).

    Raises:
        CheckpointError: It has no weights, or the weights cannot be identified.
    """
    tensors: dict[str, tuple[tuple[str, ...], AnyTensor]] = {}
    arrays: list[int] = []
    for path, tensor in _leaves(state, where):
        if isinstance(tensor, Record):
            arrays.append(_array_bytes(tensor))
            continue
        name = ".".join(path)
        if name in tensors:
            raise CheckpointError(f"{where} holds two tensors under the name {name}; which one is meant?")
        tensors[name] = path, tensor
    selection = select_weights({name: path for name, (path, _) in tensors.items()}, where)
    extras = {kind: extra_of([tensors[name][1] for name in names]) for kind, names in selection.extras.items()}
    if arrays:
        other = extras.get(OTHER, Extra(0, 0))
        extras[OTHER] = Extra(other.num_tensors + len(arrays), other.num_bytes + sum(arrays))
    return {fqn: tensors[name][1] for name, fqn in selection.names.items()}, extras


def select_weights(paths: Mapping[str, Sequence[object]], where: Path) -> Selection:
    """Select the weights among tensors with these keys; raise CheckpointError for none or an unclear choice.

    Args:
        paths: The keys that lead to each stored name in the nested state dict.
        where: The file, for messages.
    """
    try:
        selection = split_state(paths) if paths else Selection({}, {})
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if not selection.names:
        kinds = " and ".join(format_count(len(names), f"{kind} tensor") for kind, names in selection.extras.items())
        raise CheckpointError(f"{where} holds {kinds or 'no tensors at all'}, and no weights.")
    return selection


def walk(state: Any, where: Path) -> Iterator[tuple[tuple[str, ...], AnyTensor]]:
    """Yield every tensor with the keys that lead to it; raise CheckpointError for endless nesting."""
    return ((path, leaf) for path, leaf in _leaves(state, where) if not isinstance(leaf, Record))


def _leaves(state: Any, where: Path) -> Iterator[tuple[tuple[str, ...], AnyTensor | Record]]:
    """Yield every tensor and every numpy array."""
    # A pickle can refer to a list many times, even within itself; the list is walked each time.
    num_containers, seen = 0, 0
    stack: list[tuple[tuple[str, ...], Any]] = [((), state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, AnyTensor) or _is_array(value):
            yield path or ("tensor",), value
        elif isinstance(value, (dict, list, tuple)):
            num_containers += 1
            if len(path) > _MAX_DEPTH or num_containers > _MAX_CONTAINERS:
                raise CheckpointError(f"{where} is nested in itself, or deeper than any state dict.")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [(key, item) for key, item in items if isinstance(item, _WALKED) or _is_array(item)]
            seen += len(inner)
            refuse_excess(seen / 2, "tensors", f"{where} is nested in itself, or has too many tensors")
            stack += reversed([((*path, str(key)), item) for key, item in inner])


def _is_array(value: Any) -> bool:
    return isinstance(value, Record) and value.name in _ARRAYS


def _array_bytes(array: Record) -> int:
    """The bytes of an array's data, which are unknown for arrays of objects."""
    state = array.state or array.arguments[:1]
    data = state[-1] if isinstance(state, tuple) and state else None
    return len(data) if isinstance(data, (bytes, bytearray)) else 0


def readable(tensor: object, name: str, where: Path) -> StoredTensor:
    """Return the tensor if all of it is in `where` as plain bytes; else raise a CheckpointError that names both."""
    if isinstance(tensor, StoredTensor):
        return tensor
    if isinstance(tensor, Unreadable):
        problem = tensor.problem
    elif isinstance(tensor, AnyTensor):
        problem = "is only one rank's part of a tensor; give the directory with the files of all ranks"
    else:
        problem = f"is a {type(tensor).__name__}, not a tensor"
    raise CheckpointError(f"{where}: tensor {name} {problem}.")


def plain_entry(name: str, tensor: object, file: str, where: Path) -> TensorEntry:
    """Return the entry of a tensor that one file holds in full; raise CheckpointError like `readable`."""
    plain = readable(tensor, name, where)
    return TensorEntry(name, plain.dtype, plain.shape, (piece_of(file, plain, (0,) * len(plain.shape)),))


def extra_of(tensors: Sequence[AnyTensor]) -> Extra:
    """Count the tensors, and the bytes of their parts in this file."""
    return Extra(len(tensors), sum(map(_num_bytes, tensors)))


def _num_bytes(tensor: AnyTensor) -> int:
    if isinstance(tensor, StoredDTensor):
        return _num_bytes(tensor.local)
    if isinstance(tensor, StoredShards):
        return sum(_num_bytes(shard) for _, shard in tensor.shards)
    return tensor.num_elements * itemsize(tensor.dtype) if isinstance(tensor, StoredTensor) else 0


def without_copies(found: Mapping[str, TensorEntry], root: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tie tensors that consist of the same bytes.

    Args:
        found: The tensors by name.
        root: The directory of their files.

    Returns:
        Each tensor once, under its first name; and {alias: that name}.

    Raises:
        CheckpointError: The tensors have far more bytes than the files: a kilobyte can hold terabytes of zeros.
    """
    kept: dict[str, TensorEntry] = {}
    owners: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, entry in found.items():
        owner = owners.setdefault((entry.dtype, entry.shape, entry.pieces), name) if entry.pieces else name
        if owner == name:
            kept[name] = entry
        else:
            aliases[name] = owner
    _refuse_views(kept, root)
    return kept, aliases


def _refuse_views(tensors: Mapping[str, TensorEntry], root: Path) -> None:
    pieces = [piece for entry in tensors.values() for piece in entry.pieces]
    stored = sum((root / file).stat().st_size for file in {piece.file for piece in pieces})
    logical = sum(entry.num_bytes for entry in tensors.values())
    extents = sum(piece.codec.num_bytes for piece in pieces if piece.codec is not None)
    beyond = max(logical - stored, extents - _EXTENTS_PER_BYTE * stored)
    what = f"{root}: its files have {format_size(stored)}, but hold views of {format_size(max(logical, extents))}"
    refuse_excess(beyond, "view_bytes", what)
