"""Format `torch_checkpointing` of Meta's library of that name: one file per item of the state and rank.

The default is `ITEM_RANK.pt` (`model_0.pt`, `optimizer_0.pt`) of torch.save, with DTensors that record which part they
are. For items with a resharder, `metadata.pkl` describes files and shardings; the files may then have other names and
be safetensors of local tensors. Other names require it. Imports no torch, runs no pickle.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.rank_parts import NO_WEIGHTS, Part, assemble_parts, other_state
from fsdp_shard.checkpoint.formats.several_files import files_by_rank, sum_extras
from fsdp_shard.checkpoint.formats.torch_checkpointing_metadata import (
    METADATA,
    SAFETENSORS,
    TORCH,
    ItemFile,
    ItemMetadata,
    Keys,
    Sharding,
    has_metadata,
    read_metadata,
)
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file, member, read_header
from fsdp_shard.checkpoint.tensor_entry import Extra
from fsdp_shard.checkpoint.tensor_slices import row_major_strides
from fsdp_shard.checkpoint.torch_pickle import AnyTensor, StoredDTensor, StoredTensor, Unreadable, is_torch_file
from fsdp_shard.errors import CheckpointError

NAME = "torch_checkpointing"

_MODEL = "model"  # the item with the weights in the library's own tutorials, and in torchtitan
# torchtune's shards of a full model, hf_model_0001_0.pt, are not rank files.
_FILE = re.compile(r"(?P<item>.*?(?<!_\d{4}))_(?P<rank>0|[1-9]\d{0,6})\.pt")


def recognize(path: Path) -> bool:
    """Return whether `path` has the metadata, or files of `model` and other items, or of several ranks."""
    if not path.is_dir():
        return False
    if has_metadata(path):
        return True
    items = _listed(path)
    is_model = _MODEL in items and len(items) > 1
    return any(
        0 in ranks and (len(ranks) > 1 or (is_model and item == _MODEL)) and is_torch_file(path / ranks[0].file)
        for item, ranks in items.items()
        if not NO_WEIGHTS.search(item)
    )


def read(path: Path) -> TensorIndex:
    """Return the index of all ranks' files; each must exist, and together they must hold every tensor."""
    described = read_metadata(path) if has_metadata(path) else {}
    items = _listed(path) | {name: _files(name, item) for name, item in described.items()}
    others = {name for name in items if NO_WEIGHTS.search(name) or (_MODEL in items and name != _MODEL)}
    parts: dict[str, list[Part]] = {}
    paths: dict[str, Keys] = {}
    for name in sorted(items.keys() - others):
        _require_ranks(path, name, items[name])
        for rank, item_file in items[name].items():
            for keys, part in _parts(path, name, rank, item_file, described.get(name)):
                stored = ".".join(keys)
                if paths.setdefault(stored, keys) != keys:
                    raise CheckpointError(f"{path} holds two tensors under the name {stored}; which one is meant?")
                parts.setdefault(stored, []).append(part)
    selection = torch_pickle.select_weights(paths, path)
    weights = {fqn: parts[stored] for stored, fqn in selection.names.items()}
    world_size = 1 + max(part.rank for held in weights.values() for part in held)
    tensors, aliases, replicas = assemble_parts(path, weights, world_size)
    extras: dict[str, Extra] = {}
    for kind, names in selection.extras.items():
        extras = sum_extras(extras, {kind: torch_pickle.extra_of([part.tensor for n in names for part in parts[n]])})
    for name in sorted(others):
        extras = sum_extras(extras, _other(path, name, items[name]))
    return TensorIndex(path, NAME, tensors, aliases, world_size=world_size, extras=extras, replicas=replicas)


_Ranks = Mapping[int, ItemFile]


def _listed(path: Path) -> dict[str, _Ranks]:
    """Return the files with default names: item -> rank -> file."""
    items: dict[str, dict[int, ItemFile]] = {}
    for entry in sorted(path.iterdir()):
        if (match := _FILE.fullmatch(entry.name)) and has_file(path, entry.name):
            items.setdefault(match["item"], {})[int(match["rank"])] = ItemFile(entry.name)
    return {name: dict(sorted(ranks.items())) for name, ranks in items.items()}


def _files(name: str, item: ItemMetadata) -> _Ranks:
    return {rank: file or ItemFile(f"{name}_{rank}.pt") for rank, file in item.files.items()}


def _require_ranks(path: Path, name: str, ranks: _Ranks) -> None:
    """Raise CheckpointError unless each rank has its own file of the item."""
    if not ranks:
        raise CheckpointError(f"{path / METADATA} has item {name}, but no tensors in it.")
    files_by_rank(path, [(rank, item_file.file) for rank, item_file in ranks.items()], kind=f"file of item {name}")
    if len({item_file.file for item_file in ranks.values()}) != len(ranks):
        raise CheckpointError(f"{path / METADATA} has one file for several ranks of item {name}.")


def _parts(
    path: Path, name: str, rank: int, item_file: ItemFile, described: ItemMetadata | None
) -> Iterator[tuple[Keys, Part]]:
    """Yield the tensors in a rank's file with their keys, the first of which is the item."""
    where = member(path, item_file.file)
    if item_file.serialization not in (TORCH, SAFETENSORS):
        if described is not None and described.num_tensors[rank]:
            raise CheckpointError(f"{where} holds tensors as {item_file.serialization[:100]}, which is not read.")
        return
    number = 0
    for keys, tensor in _stored(where, item_file, rank, described):
        number += 1
        yield (name, *keys), Part(rank, item_file.file, where, tensor)
    if described is not None and number != described.num_tensors[rank]:
        raise CheckpointError(
            f"{where} holds {number} tensors, but {METADATA} says {described.num_tensors[rank]} of item {name}: "
            "these are files of different saves."
        )


def _stored(
    where: Path, item_file: ItemFile, rank: int, described: ItemMetadata | None
) -> Iterator[tuple[Keys, AnyTensor]]:
    """Yield the tensors in a file with their keys in its item, checked against the metadata."""
    if item_file.serialization == SAFETENSORS:
        assert described is not None, "only the metadata says that a file is safetensors"
        yield from _local_tensors(where, rank, described)
        return
    for keys, tensor in torch_pickle.walk(torch_pickle.read_torch_file(where), where):
        if described is not None:
            _compare(where, keys, rank, tensor, described)
        yield keys, tensor


def _local_tensors(where: Path, rank: int, described: ItemMetadata) -> Iterator[tuple[Keys, AnyTensor]]:
    """Yield the local tensors in a safetensors file, whose names are their keys, joined with dots."""
    for name, stored in read_header(where).tensors.items():
        keys = described.keys.get(name, (name,))
        sharding = _described(where, keys, rank, described)
        if sharding is None:
            raise CheckpointError(f"{where}: {METADATA} describes tensor {name} as something else than a DTensor.")
        if stored.dtype != sharding.dtype:
            raise CheckpointError(f"{where}: tensor {name} is {stored.dtype}, but {sharding.dtype} in {METADATA}.")
        strides = row_major_strides(stored.shape)
        yield keys, sharding.part(StoredTensor(stored.dtype, stored.shape, strides, stored.start))


def _compare(where: Path, keys: Keys, rank: int, tensor: AnyTensor, described: ItemMetadata) -> None:
    """Raise CheckpointError if a tensor of torch.save contradicts the metadata."""
    sharding = _described(where, keys, rank, described)
    if sharding is None or isinstance(tensor, Unreadable):
        return
    found: tuple[object, ...] = (tensor.shape,)
    expected: tuple[object, ...] = (sharding.shape,)
    if isinstance(tensor, StoredDTensor):
        found += tensor.mesh_shape, tensor.placements
        expected += sharding.mesh_shape, sharding.placements
    if found != expected:
        raise CheckpointError(
            f"{where}: tensor {'.'.join(keys)} has shape, mesh and placements {_words(found)}, but {_words(expected)} "
            f"in {METADATA}: these are files of different saves."
        )


def _described(where: Path, keys: Keys, rank: int, described: ItemMetadata) -> Sharding | None:
    try:
        return described.sharding(keys, rank)
    except KeyError:
        raise CheckpointError(
            f"{where} holds tensor {'.'.join(keys)}, which {METADATA} does not have for rank {rank}: these are files "
            "of different saves."
        ) from None


def _words(description: tuple[object, ...]) -> str:
    return ", ".join(str(list(map(str, part)) if isinstance(part, tuple) else part)[:100] for part in description)


def _other(path: Path, name: str, ranks: _Ranks) -> dict[str, Extra]:
    """Return the extras of an item without weights, as far as its files exist."""
    kind = "optimizer" if "optim" in name else "other"
    extras: dict[str, Extra] = {}
    for item_file in ranks.values():
        if has_file(path, item_file.file):
            extras = sum_extras(extras, other_state(path, item_file.file, kind))
    return {kind: extra for kind, extra in extras.items() if extra.num_tensors or extra.num_bytes}
