"""The `metadata.pkl` of torch_checkpointing: each rank's file of an item, and how its tensors are sharded.

It is a pickle of plain dictionaries, read through our own allow-list. Source: `distributed_metadata.py` and
`dtensor_metadata.py` of torch_checkpointing 0.1.1.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.io import find_torch_name, member
from fsdp_shard.checkpoint.torch_pickle import Placement, StoredDTensor, StoredTensor, Unreadable, counts, text
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import limits, open_regular, parse_json, read_bounded

METADATA = "metadata.pkl"
TORCH, SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"
_VERSION = "2.0"
_MARK, _MARK_BYTES = b"nested_path_to_metadata", 4096  # a key close to the beginning
_MAX_GROUPS = 1024  # groups of ranks, each with the tensor on its own mesh

T = TypeVar("T")
Keys = tuple[str, ...]


class ItemFile(NamedTuple):
    """The file with a rank's part of an item, relative to the checkpoint, and its serialization."""

    file: str
    serialization: str = TORCH


@dataclass(frozen=True)
class Sharding:
    """How a tensor is sharded; `mesh_ranks` are in row-major order of `mesh_shape`."""

    dtype: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def part(self, local: StoredTensor | Unreadable) -> StoredDTensor:
        """Return a rank's part of the tensor, as torch.save would have written it."""
        return StoredDTensor(local, self.shape, self.mesh_shape, self.mesh_ranks, None, self.placements)


Groups = Sequence[tuple[frozenset[int], Sharding | None]]


@dataclass(frozen=True)
class ItemMetadata:
    """The metadata of an item.

    Attributes:
        files: The file of each rank with tensors of the item; None if it has the default name.
        num_tensors: The number of tensors that each rank has.
        keys: A tensor's keys by its name, which is the keys joined with dots.
        groups: Keys of a tensor -> (ranks, its sharding on them); None for shardings other than a DTensor's.
    """

    files: dict[int, ItemFile | None]
    num_tensors: Counter[int]
    keys: dict[str, Keys]
    groups: dict[Keys, Groups]

    def sharding(self, keys: Keys, rank: int) -> Sharding | None:
        """Return how a rank's tensor is sharded; KeyError if the rank has none with these keys."""
        for ranks, sharding in self.groups.get(keys, ()):
            if rank in ranks:
                return sharding
        raise KeyError(keys)


def has_metadata(path: Path) -> bool:
    """Return whether the directory has a `metadata.pkl` of torch_checkpointing; raises nothing."""
    try:
        with open(open_regular(path / METADATA), "rb") as file:
            return _MARK in file.read(_MARK_BYTES)
    except (CheckpointError, OSError):
        return False


def read_metadata(path: Path) -> dict[str, ItemMetadata]:
    """Return the items in the metadata of the checkpoint in `path`.

    Raises:
        CheckpointError: The metadata is malformed, of another version, or names something outside the allow-list.
    """
    where = member(path, METADATA)
    document = torch_pickle.load(read_bounded(where, "metadata_bytes"), str(where))
    version = document.get("version") if isinstance(document, dict) else None
    if version != _VERSION:
        raise CheckpointError(
            f"{where} is of version {str(version)[:20]}; version {_VERSION} is read, that of torch_checkpointing 0.1.1."
        )
    try:
        parser = _Parser(where)
        return {text(name): parser.item(item) for name, item in document["metadata"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is malformed: {type(error).__name__}: {str(error)[:200]}.") from None


class _Parser:
    """Parses items. A pickle refers to one object many times; each is parsed once."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._parsed: dict[tuple[str, int], Any] = {}  # by the function that parses, and the object's id

    def _once(self, parse: Callable[[Any], T], stored: Any) -> T:
        key = parse.__name__, id(stored)
        if key not in self._parsed:
            self._parsed[key] = parse(stored)
        found: T = self._parsed[key]
        return found

    def item(self, item: Any) -> ItemMetadata:
        groups: dict[Keys, Groups] = {}
        lists: dict[int, Any] = {}
        uses: Counter[int] = Counter()  # of each list of groups, by its id
        described = item["nested_path_to_metadata"]
        for keys, stored in zip(self._all_keys(described), described.values(), strict=True):
            groups[keys] = self._once(self._groups, stored)
            lists[id(stored)] = stored
            uses[id(stored)] += 1
        num_on: Counter[frozenset[int]] = Counter()  # tensors by their ranks
        for key, stored in lists.items():
            for ranks, _ in self._once(self._groups, stored):
                num_on[ranks] += uses[key]
        num_tensors: Counter[int] = Counter()
        for ranks, number in num_on.items():
            for rank in ranks:
                num_tensors[rank] += number
        by_name = {".".join(keys): keys for keys in groups}
        if len(by_name) != len(described):
            raise ValueError("two tensors of the same name")
        layouts = item["rank_to_layout_info"]
        files = {rank: _file(layouts.get(rank)) for rank in sorted(num_tensors)}
        return ItemMetadata(files, num_tensors, by_name, groups)

    def _groups(self, groups: Any) -> Groups:
        if not isinstance(groups, list) or len(groups) > _MAX_GROUPS:
            raise ValueError(f"a tensor on more than {_MAX_GROUPS} meshes")
        return [
            (self._once(_ranks, group["ranks"]), self._once(self._sharding, group["sharding_metadata"]))
            for group in groups
        ]

    def _all_keys(self, paths: Mapping[Any, Any]) -> list[Keys]:
        """Parse the paths of all tensors, each a list in JSON, into keys; doing it all at once is faster."""
        joined = ",".join(map(text, paths))
        found = parse_json(f"[{joined}]".encode(), f"the paths of tensors in {self._where}")
        if len(found) != len(paths):
            raise ValueError(f"{len(found)} paths of {len(paths)} tensors")
        for keys in found:
            if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
                raise TypeError(f"{str(keys)[:100]} as the path of a tensor")
        return [tuple(map(str, keys)) for keys in found]

    def _sharding(self, packed: Any) -> Sharding | None:
        if packed["type"] != "DTensorShardingMetadata":
            return None
        data = packed["data"]
        dtype = find_torch_name(text(data["dtype"]))
        if dtype is None:
            raise ValueError(f"{data['dtype'][:100]} as a dtype")
        mesh_shape, mesh_ranks = self._once(_mesh, data["mesh_spec"])
        if len(data["placements"]) != len(mesh_shape):
            raise ValueError(f"{len(data['placements'])} placements on a mesh of {len(mesh_shape)} dimensions")
        placements = tuple(map(_placement, data["placements"]))
        return Sharding(dtype, counts(data["global_shape"]), mesh_shape, mesh_ranks, placements)


def _ranks(ranks: Any) -> frozenset[int]:
    return frozenset(counts(ranks, limits().mesh_ranks))


def _mesh(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a mesh and its ranks."""
    shape, ranks = counts(spec["mesh_shape"]), counts(spec["mesh_data"], limits().mesh_ranks)
    if math.prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(f"a mesh of shape {list(shape)} with the ranks {list(ranks[:16])}")
    return shape, ranks


def _placement(spec: Any) -> Placement:
    kind = spec["type"]
    if kind == "Replicate":
        return Placement("replicate")
    if kind not in ("Shard", "StridedShard"):
        raise ValueError(f"{str(kind)[:100]} as a placement")
    dim, factor = counts((spec["dim"], spec["split_factor"] if kind == "StridedShard" else 1))
    return Placement("shard", dim, factor)


def _file(layout: Any) -> ItemFile | None:
    """Return the file of a rank's part of an item; None if it has the default name."""
    if layout is None:
        return None
    return ItemFile(text(layout["file_path"]), text(layout["serialization_format"]["type"]))
