"""Finds tied weights of a checkpoint that does not record them.

A Hugging Face directory omits tied tensors and its model adds them again; a DCP directory holds each of them twice.
Only the model's config and class define the ties, so these are read, and only if it matters.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.digests import read_chunks
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import has_file
from fsdp_shard.checkpoint.model_files import CONFIG, read_config
from fsdp_shard.errors import CheckpointError, ModelError

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight")
HEADS = (_HEAD, "output.weight", "embed_out.weight", "proj_out.weight")


def absent_ties(index: TensorIndex, side: Path) -> dict[str, str]:
    """Find names that are not stored because the model ties them to stored tensors.

    If config.json alone is not enough, the model is built on the meta device, which imports transformers.

    Args:
        index: The checkpoint.
        side: The directory of config.json.

    Returns:
        {alias: kept name}; empty without a config, or if its class is not one of transformers.
    """
    if index.aliases or not has_file(side, CONFIG):
        return {}
    ties = _ties_in_config(index, read_config(side))
    if ties is not None:
        return ties
    from fsdp_shard.models import build_on_meta, load_config, tied_names

    try:
        model = build_on_meta(load_config(side), "float32")
    except ModelError:
        return {}
    names = tied_names(model)
    return {alias: kept for alias, kept in names.items() if kept in index.tensors and alias not in index.tensors}


def with_own_head(index: TensorIndex) -> TensorIndex:
    """Return `index` with a separate output head if that shares storage with an embedding, but config.json ties none.

    transformers then requires both.
    """
    if _HEAD not in index.aliases or _ties_in_config(index, read_config(index.model_directory)) != {}:
        return index
    tensors = {**index.tensors, _HEAD: index.entry(_HEAD)._replace(name=_HEAD)}
    return replace(index, tensors=tensors, aliases={a: kept for a, kept in index.aliases.items() if a != _HEAD})


def usual_ties(index: TensorIndex) -> dict[str, str]:
    """Return the unstored output head that a decoder's config ties to its embedding: {alias: kept name}."""
    try:
        return _ties_in_config(index, read_config(index.model_directory)) or {}
    except CheckpointError:  # code that needs the config reports its errors; the weights can be read without it
        return {}


def stored_twice(index: TensorIndex) -> dict[str, str]:
    """Find stored output heads that equal, byte for byte, the embedding to which config.json ties them."""
    heads = [name for name in index.names if name.endswith(HEADS)]
    if len(heads) != 1 or read_config(index.model_directory).get("tie_word_embeddings") is not True:
        return {}
    embeddings = (name for name in index.names if name.endswith(_EMBEDDINGS))
    kept = next((name for name in embeddings if has_same_bytes(index, name, heads[0])), None)
    return {} if kept is None else {heads[0]: kept}


def may_contradict(index: TensorIndex, ties: Mapping[str, str]) -> bool:
    """Return whether config.json seems to contradict the tensors about a tied output head; reads no tensors.

    Args:
        index: The checkpoint.
        ties: The ties, both recorded ones and those that `stored_twice` found.
    """
    config = read_config(index.model_directory)
    heads = [name for name in (*index.tensors, *index.aliases) if name.endswith(HEADS)]
    if config.get("tie_word_embeddings") is False:
        return not heads and _is_decoder(config)
    return config.get("tie_word_embeddings") is True and len(heads) == 1 and heads[0] not in ties


def has_same_bytes(index: TensorIndex, first: str, second: str) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bytes; reads them only if the first two are equal."""
    one, two = index.entry(first), index.entry(second)
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    chunks = zip(read_chunks(index, first), read_chunks(index, second), strict=True)
    return all(part.tobytes() == other.tobytes() for part, other in chunks)  # memoryviews compare item by item


def _ties_in_config(index: TensorIndex, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a decoder's ties with the usual names, {} if it has none; None if the config alone does not decide it."""
    is_tied = config.get("tie_word_embeddings")
    if not _is_decoder(config) or config.get("is_encoder_decoder"):
        return None
    if is_tied is False or _HEAD in index.tensors:
        return {}
    embeddings = [name for name in index.names if name in ("model.embed_tokens.weight", "transformer.wte.weight")]
    return {_HEAD: embeddings[0]} if is_tied is True and len(embeddings) == 1 else None


def _is_decoder(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and str(next(iter(classes), "")).endswith(("ForCausalLM", "LMHeadModel"))
