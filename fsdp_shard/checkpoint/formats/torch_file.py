"""Format `pytorch`: full state dicts from torch.save: `pytorch_model.bin`, its shards, any single `.pt` or `.ckpt`.

If a directory also has safetensors, those are used: the registry checks for them first. Imports no torch, runs no
pickle.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats.deepspeed_files import refuse_incomplete
from fsdp_shard.checkpoint.formats.huggingface import read_index_file, refuse_differences
from fsdp_shard.checkpoint.formats.several_files import add_entry, sum_extras
from fsdp_shard.checkpoint.formats.trainer_layouts import holds_models
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.checkpoint.tensor_entry import Extra, TensorEntry
from fsdp_shard.checkpoint.torch_pickle import AnyTensor, StoredDTensor, StoredShards, StoredTensor, is_torch_file
from fsdp_shard.errors import CheckpointError

NAME = "pytorch"

SINGLE_FILE, INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Trainers' files without weights.
_NO_WEIGHTS = re.compile(
    r"(optim|scheduler|lr_scheduler|scaler|random_state|rng_state|training_args|recipe_state|trainer|extra_state|"
    r"dataloader|dl_state_dict|data(_\d+)?\.pt$|sampler|custom_checkpoint|adapter_)"
)
# Beside models or steps that a training stack has named, a single file of another name is some state of the run.
_MODEL = re.compile(
    r"(pytorch_|lit_)?model|consolidated|weights|checkpoint|ckpt|state_dict|final|last|best|merged|epoch|step",
    re.IGNORECASE,
)
# Shards without an index: torchtune's hf_model_0001_0.pt, and model-00001-of-00002.bin.
_SHARD = re.compile(r"(?P<stem>.*?)[-_](?P<number>\d{4,5})(?:-of-(?P<count>\d{4,5})|(?:_\d+)?)(?P<suffix>\.\w+)")


def recognize(path: Path) -> bool:
    """Whether `path` is a torch.save file, or a directory with `pytorch_model.bin`, its index, or similar files."""
    if path.is_file():
        return is_torch_file(path)
    return path.is_dir() and (has_file(path, INDEX_FILE) or bool(_weight_files(path)))


def read(path: Path) -> TensorIndex:
    """Return the index of a file or directory that `recognize` accepts."""
    if path.is_file():
        path = path.resolve()  # the user named this file, so a link is followed
        return _read_files(path.parent, [path.name])
    if has_file(path, SINGLE_FILE) or not has_file(path, INDEX_FILE):
        return _read_files(path, _weight_files(path))
    weight_map = read_index_file(path, INDEX_FILE)["weight_map"]
    index = _read_files(path, sorted(set(weight_map.values())))
    held = {name: index.entry(name).pieces[0].file for name in (*index.tensors, *index.aliases)}
    refuse_differences(path / INDEX_FILE, weight_map, held)
    return index


def _weight_files(path: Path) -> list[str]:
    """The weight file, or the shards of one model; empty if the files are ambiguous."""
    if has_file(path, SINGLE_FILE):
        return [SINGLE_FILE]
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix in _SUFFIXES and has_file(path, entry.name))
    names = [name for name in names if not _NO_WEIGHTS.match(name)]
    if len(names) == 1:
        is_state = not _MODEL.match(names[0]) and holds_models(path)
        return names if is_torch_file(path / names[0]) and not is_state else []
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    is_one_model = len({(match["stem"], match["count"], match["suffix"]) for match in shards}) == 1
    return names if len(shards) == len(names) and is_one_model else []


def _read_files(root: Path, names: Sequence[str]) -> TensorIndex:
    _refuse_gaps(root, names)
    found: dict[str, TensorEntry] = {}
    extras: dict[str, Extra] = {}
    for file in names:
        where = member(root, file)
        content = torch_pickle.read_torch_file(where)
        refuse_incomplete(content, where)
        weights, others = torch_pickle.weights_of(content, where)
        extras = sum_extras(extras, others)
        for name, tensor in weights.items():
            add_entry(found, torch_pickle.plain_entry(name, _full(tensor), file, where), root)
    tensors, aliases = torch_pickle.without_copies(found, root)
    return TensorIndex(root, NAME, tensors, aliases, extras=extras)


def _refuse_gaps(root: Path, names: Sequence[str]) -> None:
    """Require all shards numbered `-of-`, and no gaps between or before other numbered shards."""
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if not shards or len(shards) != len(names) or has_file(root, INDEX_FILE):
        return
    if shards[0]["count"]:
        if len(names) != int(shards[0]["count"]):
            raise CheckpointError(
                f"{root} has {len(names)} of the {int(shards[0]['count'])} shards of which {names[0]} is one."
            )
        return
    numbers = sorted({int(match["number"]) for match in shards})
    if len(names) > 1 and numbers != list(range(min(numbers[0], 1), numbers[-1] + 1)):
        raise CheckpointError(
            f"{root} has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}, which are numbered with gaps: "
            f"shards of a model are missing. If each of them is a whole model, give the file instead of the directory."
        )


def _full(tensor: AnyTensor) -> AnyTensor:
    """The plain tensor in a DTensor or ShardedTensor that a single rank holds in full."""
    if isinstance(tensor, StoredDTensor) and all(placement.kind != "partial" for placement in tensor.placements):
        is_full = isinstance(tensor.local, StoredTensor) and tensor.local.shape == tensor.shape
        return tensor.local if is_full else tensor
    if isinstance(tensor, StoredShards) and len(tensor.shards) == 1 and tensor.shards[0][1].shape == tensor.shape:
        return tensor.shards[0][1]
    return tensor
