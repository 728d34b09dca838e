"""Tied weights of a checkpoint that does not say which of its tensors are tied.

A Hugging Face directory leaves tied tensors out and its model puts them back; a DCP directory holds each of them twice.
Only the model's config and class know, so they are asked, and only where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.io.files import has_file, member, read_json
from fsdp_shard.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.index import TensorIndex

CONFIG = "config.json"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight", "proj_out.weight")


def absent_ties(index: TensorIndex, side: Path) -> dict[str, str]:
    """Names that the model of `side`/config.json ties to stored tensors, and that are not stored: {alias: kept}.

    Where config.json alone does not tell, the model is built on the meta device, which imports transformers. Empty
    without a config, or where its class is none of transformers' own.
    """
    if index.aliases or not has_file(side, CONFIG):
        return {}
    told = _told_by_config(index, side)
    if told is not None:
        return told
    from fsdp_shard.models import ModelSource, build_on_meta, load_config, tied_names

    try:
        model = build_on_meta(load_config(ModelSource(side, None)), "float32")
    except (
        ModelError,
        ArithmeticError,
        AttributeError,
        TypeError,
        ValueError,
    ):  # what odd configs raise in transformers
        return {}
    names = tied_names(model)
    return {alias: kept for alias, kept in names.items() if kept in index.tensors and alias not in index.tensors}


def with_own_head(index: TensorIndex, side: Path) -> TensorIndex:
    """`index`, with an output head of its own where that shares its storage with an embedding and config.json does not
    tie the two: transformers looks for both then.
    """
    head = "lm_head.weight"
    if head not in index.aliases or not has_file(side, CONFIG):
        return index
    config = read_json(member(side, CONFIG))
    if not isinstance(config, Mapping) or config.get("tie_word_embeddings") is not False:
        return index
    if _told_by_config(index, side) is None:
        return index
    tensors = {**index.tensors, head: index.entry(head)._replace(name=head)}
    return replace(index, tensors=tensors, aliases={a: kept for a, kept in index.aliases.items() if a != head})


def usual_ties(index: TensorIndex, side: Path) -> dict[str, str]:
    """The output head that a decoder's config ties to its embedding, where it is not stored: {alias: kept}."""
    try:
        return (_told_by_config(index, side) or {}) if has_file(side, CONFIG) else {}
    except CheckpointError:  # who needs the config will say what is wrong with it; the weights can be read without
        return {}


def _told_by_config(index: TensorIndex, side: Path) -> dict[str, str] | None:
    """The ties of a decoder with the usual names, None where more has to be known."""
    config = read_json(member(side, CONFIG))
    if not isinstance(config, Mapping) or config.get("is_encoder_decoder"):
        return None
    is_tied, classes = config.get("tie_word_embeddings"), config.get("architectures")
    if not isinstance(classes, list) or not str(next(iter(classes), "")).endswith(("ForCausalLM", "LMHeadModel")):
        return None
    if is_tied is False or "lm_head.weight" in index.tensors:
        return {}
    embeddings = [name for name in index.names if name in ("model.embed_tokens.weight", "transformer.wte.weight")]
    return {"lm_head.weight": embeddings[0]} if is_tied is True and len(embeddings) == 1 else None


def stored_twice(index: TensorIndex, side: Path) -> dict[str, str]:
    """Output heads that are stored beside the embedding that config.json ties them to, byte for byte the same."""
    if not _ties_embeddings(side):
        return {}
    embeddings = [name for name in index.names if name.endswith(_EMBEDDINGS)]
    heads = [name for name in index.names if name.endswith(_HEADS)]
    if len(heads) != 1:
        return {}
    same = (name for name in embeddings if index.same_bytes(name, heads[0]))
    kept = next(same, None)
    return {} if kept is None else {heads[0]: kept}


def _ties_embeddings(side: Path) -> bool:
    if not has_file(side, CONFIG):
        return False
    config = read_json(member(side, CONFIG))
    return isinstance(config, Mapping) and config.get("tie_word_embeddings") is True
