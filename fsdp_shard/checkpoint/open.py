"""Opens the checkpoint in a directory or file: recognizes its format and completes the format's index.

The public `open_checkpoint` is in `location.py`, which finds the directory of a run, an address or a hub id first.
"""

import dataclasses
from pathlib import Path

from fsdp_shard.checkpoint.digests import file_digest, num_chunks
from fsdp_shard.checkpoint.formats.deepspeed_files import what_is_missing
from fsdp_shard.checkpoint.formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdp_shard.checkpoint.formats.registry import recognize
from fsdp_shard.checkpoint.formats.several_files import num_files
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import member
from fsdp_shard.checkpoint.keys.tied_weights import usual_ties
from fsdp_shard.checkpoint.keys.wrapper_prefixes import ADAPTER, plain_names
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest, read_manifest_of_folder
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX
from fsdp_shard.checkpoint.steps.step_store import AVERAGE
from fsdp_shard.checkpoint.tensor_entry import count
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import first_few

_MAX_NAME, _MAX_PARTS = 1000, 100  # of a tensor's name
_OLD_ADAPTER = "adapter_model.bin"
_MAX_STEP = (1 << 63) - 1  # larger numbers are not steps


def open_weights(weights: Path, side: Path | None = None, step: int | None = None) -> TensorIndex:
    """Open the weights in one directory or file, under the model's own names.

    Args:
        weights: The directory or file.
        side: The directory with config and tokenizer, if different.
        step: The training step, used if the checkpoint does not record it.

    Returns:
        The index, from headers alone.

    Raises:
        CheckpointError: `weights` is not a checkpoint, or is damaged.
    """
    found = recognize(weights)
    if found is None:
        raise CheckpointError(f"{weights} is not a checkpoint that fsdp-shard can read: {_contents(weights)}")
    index = found.read(weights)
    _refuse_names(index)
    found_step = step if index.step is None or index.step > _MAX_STEP else index.step
    index = dataclasses.replace(index, side=side, step=found_step, file=weights if weights.is_file() else None)
    if (manifest := index.manifest()) is not None:
        return _with_manifest(index, manifest)
    if index.headers and weights.name == AVERAGE and (manifest := read_manifest_of_folder(weights)) is not None:
        _check_shard_index(index, manifest, f"{AVERAGE}/{SHARD_INDEX}")
    if not getattr(found, "KEEPS_NAMES", False):
        index = _with_plain_names(index)
    return dataclasses.replace(index, aliases=index.aliases or usual_ties(index))


def is_module_path(name: str) -> bool:
    """Return whether a tensor's name may be a path of modules: checkpoints with longer names are not opened."""
    return len(name) <= _MAX_NAME and name.count(".") <= _MAX_PARTS


def _refuse_names(index: TensorIndex) -> None:
    """Reject names that are not module paths: processing their parts would take forever, or nest too deeply."""
    for name in (*index.tensors, *index.aliases):
        if not is_module_path(name):
            raise CheckpointError(
                f"{index.path} has a tensor whose name is not a path of modules: it has {len(name)} characters and "
                f"{name.count('.')} dots; it begins with {name[:100]!r}."
            )


def _with_plain_names(index: TensorIndex) -> TensorIndex:
    """Return the index under the model's own names, without wrapper prefixes."""
    # Names in a Hugging Face directory are the model's own; they may have wrapper prefixes, but no trainer's nesting.
    try:
        selection = plain_names([*index.tensors, *index.aliases], is_nested=index.format != "huggingface")
    except CheckpointError as error:
        raise CheckpointError(f"{index.path}: {error}") from None
    plain = selection.names
    if not selection.extras and all(name == fqn for name, fqn in plain.items()):
        return index
    adapters = [index.tensors[name] for name in selection.extras.get(ADAPTER, ()) if name in index.tensors]
    tensors = {plain[name]: entry._replace(name=plain[name]) for name, entry in index.tensors.items() if name in plain}
    for alias, kept in index.aliases.items():
        if kept not in plain and alias in plain:  # tied to peft's copy, which is its only value
            tensors.setdefault(plain[alias], index.tensors[kept]._replace(name=plain[alias]))
    aliases = {plain[alias]: plain[kept] for alias, kept in index.aliases.items() if {alias, kept} <= plain.keys()}
    extras = index.extras | ({ADAPTER: count(adapters)} if adapters else {})
    return dataclasses.replace(index, tensors=tensors, aliases=aliases, extras=extras)


def _with_manifest(index: TensorIndex, manifest: Manifest) -> TensorIndex:
    """Return the index completed by its manifest, which must describe the same tensors."""
    path = index.root / MANIFEST
    _check_shard_index(index, manifest)
    for name in manifest.tensors.keys() | index.tensors.keys():
        record, entry = manifest.tensors.get(name), index.tensors.get(name)
        if record is None or entry is None:
            missing = "the weight files" if entry is None else MANIFEST
            raise CheckpointError(f"{path} and the weight files disagree: tensor {name} is not in {missing}.")
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
    if index.aliases and manifest.aliases and index.aliases != manifest.aliases:
        name = min(name for name, _ in index.aliases.items() ^ manifest.aliases.items())
        raise CheckpointError(f"{path} and the weight files disagree: they tie tensor {name} to different ones.")
    return dataclasses.replace(
        index, aliases=manifest.aliases or index.aliases, step=manifest.step, world_size=manifest.world_size
    )


def _check_shard_index(index: TensorIndex, manifest: Manifest, name: str = SHARD_INDEX) -> None:
    """Reject an index of rank files that was not written with the manifest, where its name is `name`."""
    record = manifest.files.get(name)
    if index.headers and (record is None or record.digest != file_digest(member(index.root, SHARD_INDEX))):
        raise CheckpointError(
            f"{index.root / SHARD_INDEX} is not what was written, according to {MANIFEST}: the checkpoint is damaged."
        )


def _contents(path: Path) -> str:
    """Describe what was found instead of a checkpoint, for the error."""
    if path.is_file():
        return "it is neither a safetensors file, nor a GGUF file, nor one of torch.save."
    if not path.exists():
        return "it was deleted meanwhile, as a running training deletes its old steps (checkpoint.keep_last)."
    if not path.is_dir():
        return "it is neither a file nor a directory."
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return "it holds .distcp files, but no .metadata that says what is in them."
    if len([name for name in names if name.endswith(".gguf")]) > 1:
        return "it holds several GGUF files; give one of them (model.gguf_file for finetune)."
    if {ADAPTER_CONFIG, _OLD_ADAPTER} <= set(names):
        return (
            f"it holds an adapter of an old peft ({_OLD_ADAPTER}); load it with peft's PeftModel.from_pretrained and "
            f"save it by save_pretrained, which writes {ADAPTER_WEIGHTS}."
        )
    if (lack := what_is_missing(path)) is not None:
        return lack
    if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"it holds {', '.join(pickled[:5])}, of which none is known to hold its weights; give the file itself if "
            "one of them does."
        )
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if len(safetensors) == 1 and (count := num_files(safetensors[0])) > 1:
        return f"it holds {safetensors[0]}, one of {count} files of a model, without the others and their index."
    if len(safetensors) > 1:
        return "it holds several safetensors files, but no model.safetensors.index.json that says what is in them."
    return f"the directory holds {first_few(names, 5)}, but no weights." if names else "the directory is empty."
