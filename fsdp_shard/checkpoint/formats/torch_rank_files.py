"""Format `torch_ranks`: one torch.save file per rank, with DTensors (FSDP2, tensor parallelism) or ShardedTensors.

Recognized by `rank` and a number in the names (verl's `model_world_size_8_rank_0.pt`). Adjacent optimizer and trainer
states count as extras. Replicas must be equal (`Replicas`), and one of them is read. Imports no torch, runs no pickle.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.rank_parts import NO_WEIGHTS, Part, assemble_parts, other_state
from fsdp_shard.checkpoint.formats.several_files import files_by_rank, one_world_size, sum_extras
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.checkpoint.tensor_entry import Extra
from fsdp_shard.checkpoint.torch_pickle import StoredDTensor, StoredShards
from fsdp_shard.errors import CheckpointError

NAME = "torch_ranks"

_RANK = re.compile(r"(?P<stem>.*?)(?:world_size_?(?P<world>\d+)_?)?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin|ckpt)")


def recognize(path: Path) -> bool:
    """Whether `path` is a directory with rank files that hold weights."""
    return path.is_dir() and any(torch_pickle.is_torch_file(path / file[0]) for file in _files(path))


def read(path: Path) -> TensorIndex:
    """Return the index of all rank files; each must exist, and together they must hold every tensor."""
    files = _model_files(path)
    parts: dict[str, list[Part]] = {}
    extras: dict[str, Extra] = {}
    for rank, file in enumerate(files):
        where = member(path, file)
        weights, others = torch_pickle.weights_of(torch_pickle.read_torch_file(where), where)
        extras = sum_extras(extras, others)
        for name, tensor in weights.items():
            parts.setdefault(name, []).append(Part(rank, file, where, tensor))
    is_flat = any(name.rpartition(".")[2].startswith("_flat_param") for name in parts)  # FSDP1's own parameters
    is_sharded = any(isinstance(held[0].tensor, (StoredDTensor, StoredShards)) for held in parts.values())
    if is_flat or (len(files) > 1 and not is_sharded):
        raise CheckpointError(
            f"{path / files[0]} and the files of the other ranks hold plain tensors that do not say which part of "
            "the model they are: FSDP's LOCAL_STATE_DICT, or a copy on each rank. Save a FULL_STATE_DICT or a "
            "SHARDED_STATE_DICT instead; of copies, give one file."
        )
    tensors, aliases, replicas = assemble_parts(path, parts, len(files))
    extras = sum_extras(extras, _other_states(path))
    return TensorIndex(path, NAME, tensors, aliases, world_size=len(files), extras=extras, replicas=replicas)


def _files(path: Path, is_extra: bool = False) -> list[re.Match[str]]:
    """The names of rank files with weights, or of those with other states if `is_extra`."""
    names = [entry.name for entry in path.iterdir() if bool(NO_WEIGHTS.search(entry.name)) == is_extra]
    return [match for name in names if (match := _RANK.fullmatch(name)) and has_file(path, name)]


def _model_files(path: Path) -> list[str]:
    """The weight files, one per rank, in rank order."""
    files = _files(path)
    models = {file["stem"]: file[0] for file in files}
    if len(models) > 1:
        some = " and ".join(sorted(models.values()))
        raise CheckpointError(f"{path} holds the rank files of several models, such as {some}; keep one.")
    world_size = one_world_size(path, {int(file["world"]) if file["world"] else None for file in files})
    return files_by_rank(path, [(int(file["rank"]), file[0]) for file in files], world_size)


def _other_states(path: Path) -> Mapping[str, Extra]:
    """The optimizer's and the trainer's rank files."""
    extras: dict[str, Extra] = {}
    for file in _files(path, is_extra=True):
        extras = sum_extras(extras, other_state(path, file[0], "optimizer" if "optim" in file[0] else "other"))
    return extras
