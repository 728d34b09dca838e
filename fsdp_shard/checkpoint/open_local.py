"""Opening the checkpoint at a path of this machine: what lies there, in which format, under which names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fsdp_shard.checkpoint.digests import num_chunks
from fsdp_shard.checkpoint.formats import trainer_layouts
from fsdp_shard.checkpoint.formats.registry import recognize
from fsdp_shard.checkpoint.index import TensorIndex, count
from fsdp_shard.checkpoint.keys.tied_weights import usual_ties
from fsdp_shard.checkpoint.keys.wrapper_prefixes import ADAPTER, plain_names
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest
from fsdp_shard.errors import CheckpointError


def open_local(path: Path) -> TensorIndex:
    """The tensor index of what lies at `path`, as `open_checkpoint` but for remote addresses."""
    place = locate(path if path.exists() else _from_hub(path))
    found = recognize(place.weights)
    if found is None:
        raise CheckpointError(f"{place.weights} is no checkpoint that fsdp-shard reads: {_contents(place.weights)}")
    index = found.read(place.weights)
    index = dataclasses.replace(index, side=place.side, step=place.step if index.step is None else index.step)
    if place.weights.is_file():
        index = dataclasses.replace(index, file=place.weights)
    if (manifest := index.manifest()) is not None:
        return _with_manifest(index, manifest)
    if not getattr(found, "KEEPS_NAMES", False):
        index = _with_plain_names(index)
    return dataclasses.replace(index, aliases=index.aliases or usual_ties(index, index.side or index.root))


def locate(path: Path) -> trainer_layouts.Place:
    """Where weights, config and tokenizer of what lies at `path` are: a run, a checkpoint, or what is around one."""
    return trainer_layouts.find(trainer_layouts.resolve(path), lambda place: recognize(place) is not None)


def _from_hub(path: Path) -> Path:
    """The snapshot of the hub id that `path` spells; downloads what is not there yet, through transformers."""
    if path.is_symlink() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)):
        raise CheckpointError(f"{path} does not exist; give a checkpoint file, a directory, or a run directory.")
    from fsdp_shard.models import resolve

    return resolve(str(path)).weights


def _with_plain_names(index: TensorIndex) -> TensorIndex:
    """The index under the model's own names, where wrappers left theirs."""
    # A Hugging Face directory has the model's own names; wrappers may show in them, but no trainer's nesting.
    try:
        selection = plain_names([*index.tensors, *index.aliases], is_nested=index.format != "huggingface")
    except CheckpointError as error:
        raise CheckpointError(f"{index.place}: {error}") from None
    plain = selection.names
    if not selection.extras and all(name == fqn for name, fqn in plain.items()):
        return index
    adapters = [index.tensors[name] for name in selection.extras.get(ADAPTER, ()) if name in index.tensors]
    tensors = {plain[name]: entry._replace(name=plain[name]) for name, entry in index.tensors.items() if name in plain}
    for alias, kept in index.aliases.items():
        if kept not in plain and alias in plain:  # tied to what peft keeps as a copy: that is its only value
            tensors.setdefault(plain[alias], index.tensors[kept]._replace(name=plain[alias]))
    aliases = {plain[alias]: plain[kept] for alias, kept in index.aliases.items() if {alias, kept} <= plain.keys()}
    extras = index.extras | ({ADAPTER: count(adapters)} if adapters else {})
    return dataclasses.replace(index, tensors=tensors, aliases=aliases, extras=extras)


def _with_manifest(index: TensorIndex, manifest: Manifest) -> TensorIndex:
    """The index completed by the manifest beside it, which must describe the same tensors."""
    path = index.root / MANIFEST
    for name in manifest.tensors.keys() | index.tensors.keys():
        record, entry = manifest.tensors.get(name), index.tensors.get(name)
        if record is None or entry is None:
            missing = "the weight files" if entry is None else MANIFEST
            raise CheckpointError(f"{path} and the files beside it disagree: tensor {name} is not in {missing}.")
        if (record.dtype, record.shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"{path} says that tensor {name} is {record.dtype} {list(record.shape)}, but the weight files hold "
                f"{entry.dtype} {list(entry.shape)}."
            )
        if len(record.chunks) != num_chunks(entry.num_bytes):
            raise CheckpointError(
                f"{path} has the digests of {len(record.chunks)} chunks of tensor {name}, which has "
                f"{num_chunks(entry.num_bytes)}: the manifest is damaged."
            )
    return dataclasses.replace(
        index, aliases=manifest.aliases or index.aliases, step=manifest.step, world_size=manifest.world_size
    )


def _contents(path: Path) -> str:
    """What there is instead, for the error."""
    if path.is_file():
        return "it is neither a safetensors, nor a GGUF file, nor one of torch.save."
    if not path.is_dir():
        return "it is neither a file nor a directory."
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return "it holds .distcp files, but no .metadata that says what is in them."
    if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"it holds {', '.join(pickled[:5])}, of which none is known to hold its weights; give the file itself if "
            "one of them does."
        )
    if len([name for name in names if name.endswith(".safetensors")]) > 1:
        return "it holds several safetensors files, but no model.safetensors.index.json that says what is in them."
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the directory holds {some}." if names else "the directory is empty."
