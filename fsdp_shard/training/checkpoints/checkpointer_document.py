"""The state that a `Checkpointer` saves in addition to weights and optimizer tensors: a document, and tensors named in
it.

`checkpointer.json` holds only data. Tensors are stored with the optimizer state, under names that begin with `$`.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch.distributed.tensor import DTensor

from fsdp_shard.checkpoint import TensorIndex, load_shards, member, read_manifest, tensor_bytes, to_torch
from fsdp_shard.distributed import Communicator, LocalShard, is_first_copy, shard_of
from fsdp_shard.errors import CheckpointError, SaveError
from fsdp_shard.sharding import ModuleShards
from fsdp_shard.training.checkpoints.state_tree import flatten_state, restore_state
from fsdp_shard.utils import parse_json, read_bounded

DOCUMENT = "checkpointer.json"
_FORMAT_VERSION = 1
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # size in bytes -> dtype


class RankDocument(NamedTuple):
    """The documents of what one rank alone has.

    Attributes:
        state: Its random state and its `extra_per_rank`.
        scalars: The entries of its optimizer state that are not tensors, by `PARAMETER.SLOT`.
    """

    state: Any
    scalars: Any


@dataclass
class CheckpointerDocument:
    """The document of a step.

    Attributes:
        step: The step.
        metrics: The step's metrics, by name.
        extra: The `extra` that rank 0 passed.
        states: The `state_dict()` of each object, by the name under which the object was passed.
        has_slots: Whether any optimizer had tensors in its state.
        groups: The options of each parameter group of each optimizer, and the names of its parameters.
        ranks: The `RankDocument` of each rank.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    extra: Any = None
    states: dict[str, Any] = field(default_factory=dict)
    has_slots: bool = False
    groups: Any = None
    ranks: list[RankDocument] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The content of `checkpointer.json`."""
        return (json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}) + "\n").encode()


def has_document(step_directory: Path) -> bool:
    """Whether a Checkpointer saved the step: the document exists, or the manifest lists it."""
    if os.path.lexists(step_directory / DOCUMENT):
        return True
    manifest = read_manifest(step_directory)
    return manifest is not None and DOCUMENT in manifest.files


def read_document(step_directory: Path) -> CheckpointerDocument:
    """Read the document of a step; CheckpointError if it has none or it is damaged."""
    if step_directory.is_dir() and not has_document(step_directory):
        raise CheckpointError(
            f"{step_directory} has no {DOCUMENT}: it was not saved by a Checkpointer. Resume it with `fsdp-shard "
            f"finetune`, or read its weights with fsdp_shard.load_weights."
        )
    path = member(step_directory, DOCUMENT)
    values = parse_json(read_bounded(path, "metadata_bytes"), str(path))
    if not isinstance(values, dict) or values.pop("format_version", None) != _FORMAT_VERSION:
        raise CheckpointError(f"{path} is not of format version {_FORMAT_VERSION}.")
    kinds = {"step": int, "metrics": dict, "states": dict, "has_slots": bool, "ranks": list}
    names = {one.name for one in fields(CheckpointerDocument)}
    are_right = values.keys() == names and all(type(values[name]) is kind for name, kind in kinds.items())
    if not are_right or any(not isinstance(one, list) or len(one) != 2 for one in values["ranks"]):
        raise CheckpointError(f"{path} does not have the entries of a step that a Checkpointer saved.")
    return CheckpointerDocument(**{**values, "ranks": [RankDocument(*one) for one in values["ranks"]]})


class StateTensors:
    """The tensors of states, as shards for the files of the optimizer state.

    Attributes:
        shards: This rank's shards by name.
        digests: Digests of the tensors and documents that must be equal on all ranks, by name.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self.shards: dict[str, LocalShard] = {}
        self.digests: dict[str, int] = {}

    def add_own(self, state: Any, name: str) -> Any:
        """Add the tensors of a state that only this rank has; return its document."""
        document, tensors = flatten_state(state, f"${name}", self.shards)
        for key, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise SaveError(f"{key} is a DTensor, which all ranks hold together; give it in a state, not as extra.")
            self.shards[key] = _host_copy_shard(tensor.detach(), writes=True)
        return document

    def add_shared(self, state: Any, name: str) -> Any:
        """Add the tensors of a state that all ranks have: DTensors are sharded, all else is equal on all ranks."""
        document, tensors = flatten_state(state, f"${name}", self.shards)
        digest = xxhash.xxh3_64(json.dumps(document).encode())
        for key, tensor in tensors.items():
            writes = self._ranks.is_main
            if isinstance(tensor, DTensor):
                writes = is_first_copy(tensor.device_mesh, tensor.placements)
            self.shards[key] = shard = _host_copy_shard(tensor.detach(), writes=writes)
            if not isinstance(tensor, DTensor):
                digest.update(tensor_bytes(shard.data))
        self.digests[name] = digest.intdigest()
        return document

    def add_digests_of(self, found: ModuleShards) -> None:
        """Add digests of a model's names and of the parameters that all ranks hold in full: each writes some."""
        self.add_shared([list(found.shards), found.aliases], "the names of the parameters")
        if self._ranks.world_size > 1:
            held = {name: found.shards[name].data for name in found.replicated}
            on_gpu = {name: data for name, data in held.items() if data.device.type != "cpu"}
            digests = dict(zip(on_gpu, bits_sums(list(on_gpu.values())), strict=True))
            for name, data in held.items():
                digest = digests[name] if name in digests else xxhash.xxh3_64(tensor_bytes(data)).intdigest()
                self.digests[f"the parameter {name}, which each of them has whole"] = digest


def bits_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each flat tensor's elements as 64-bit integers: digests that a GPU can compute.

    A GPU is waited for once. Tensors of one element, such as the numbers of steps of an optimizer's parameters, are
    joined first, as a kernel for each would take longer than the sums.
    """
    singles: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # positions in `tensors`
    others: list[int] = []
    for position, tensor in enumerate(tensors):
        is_single = tensor.numel() == 1 and tensor.element_size() in _INTEGER_OF_SIZE
        (singles.setdefault((tensor.device, tensor.dtype), []) if is_single else others).append(position)
    sums = [_integers(torch.cat([tensors[position] for position in its])).long() for its in singles.values()]
    sums += [_integers(tensors[position]).sum(dtype=torch.int64).view(1) for position in others]
    values = torch.cat([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    by_position = dict(zip([*chain.from_iterable(singles.values()), *others], values, strict=True))
    return [by_position[position] % 2**64 for position in range(len(tensors))]


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGER_OF_SIZE.get(tensor.element_size(), torch.uint8))


def text_digest(names: list[str]) -> int:
    """A 64-bit digest of `names`."""
    return xxhash.xxh3_64(json.dumps(names).encode()).intdigest()


def first_difference(ranks: Communicator, digests: Mapping[str, int | None]) -> str | None:
    """The first name whose 64-bit digest differs between ranks, except those where it is None; a collective.

    `the names of the states` if the names themselves differ.
    """
    if not all(_agree(ranks, [text_digest(list(digests))])):
        return "the names of the states"
    are_same = _agree(ranks, list(digests.values()))
    return next((name for name, is_same in zip(digests, are_same, strict=True) if not is_same), None)


def _agree(ranks: Communicator, numbers: Sequence[int | None]) -> list[bool]:
    """Whether all ranks have the same 64-bit number or None, for each of `numbers`."""
    halves = [None if number is None else (number >> 32, number & 0xFFFFFFFF) for number in numbers]
    highest = ranks.all_reduce([float(half) for pair in halves for half in pair or (-math.inf, -math.inf)], "max")
    lowest = ranks.all_reduce([float(half) for pair in halves for half in pair or (math.inf, math.inf)], "min")
    are_same = [high <= low for high, low in zip(highest, lowest, strict=True)]
    return [all(are_same[at : at + 2]) for at in range(0, len(are_same), 2)]


def read_state(document: Any, index: TensorIndex | None, where: str, name: str = "", like: Any = None) -> Any:
    """Rebuild a state, reading its tensors from `index`.

    Args:
        document: The document that `StateTensors` returned.
        name: The name that the state was added under, if `like` is given.
        index: The optimizer state; None if the step has none.
        where: The file of the document, for errors.
        like: The object's current state; for each DTensor in it, only this rank's shard is read, into a DTensor with
            the same placement.
    """
    current = {} if like is None else flatten_state(like, f"${name}")[1]
    tensors = {}
    for key in dict.fromkeys(_names_in(document)):
        if index is None or key not in index.tensors:
            raise CheckpointError(f"{where} names the tensor {key}, which the step does not hold.")
        entry, now = index.entry(key), current.get(key)
        if isinstance(now, DTensor) and tuple(now.shape) == entry.shape:
            tensors[key] = torch.empty_like(now, dtype=to_torch(entry.dtype))
        else:
            tensors[key] = torch.empty(entry.shape, dtype=to_torch(entry.dtype))
        load_shards(index, {key: shard_of(tensors[key], writes=False)})
    return restore_state(document, tensors, where)


def _names_in(document: Any) -> list[str]:
    """The names of the tensors in a document."""
    if isinstance(document, dict):
        if len(document) == 1 and isinstance(name := document.get("$tensor"), str):
            return [name]
        return [name for item in document.values() for name in _names_in(item)]
    return [name for item in document for name in _names_in(item)] if isinstance(document, list) else []


def _host_copy_shard(tensor: torch.Tensor, *, writes: bool) -> LocalShard:
    """The shard of a copy in host memory, as the object may change its state during the save."""
    shard = shard_of(tensor.contiguous(), writes=writes)
    data = shard.data.to("cpu", copy=True)
    return LocalShard(data, data, shard.start, shard.shape, writes, shard.box)


def random_state() -> dict[str, Any]:
    """The state of the random number generators of Python, numpy and torch, and of this rank's GPU if it uses one."""
    name, keys, *rest = tuple(numpy.random.get_state(legacy=True))
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": (
            str(name),
            numpy.asarray(keys).tobytes(),
            *(value.item() if hasattr(value, "item") else value for value in rest),
        ),
        "torch": bytes(torch.get_rng_state().numpy()),
        "cuda": None if cuda is None else bytes(cuda.numpy()),
    }


def restore_random_state(state: Mapping[str, Any], where: str) -> None:
    """Restore a result of `random_state`; raise CheckpointError, which names `where`, if `state` is not one."""
    try:
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where} has no random state that can be restored ({error!r}).") from error


def _byte_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
