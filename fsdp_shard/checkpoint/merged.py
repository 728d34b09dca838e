"""Tensors that transformers merges as it loads (the experts of a mixture), served from where their parts lie.

The merged tensor becomes an entry of the index whose pieces are those of its parts, each moved to its place: nothing is
read or copied. Looks at names and shapes only; knows no device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.entries import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    from fsdp_shard.checkpoint.index import TensorIndex

Part = tuple[int, int, TensorEntry]  # expert, place among the tensors that are put after one another, as it is stored


def merge_parts(
    model: PreTrainedModel,
    index: TensorIndex,
    converters: Sequence[WeightConverter],
    parts: Mapping[str, Sequence[str]],
) -> None:
    """Put into `index`, for each model name in `parts`, one entry instead of the stored tensors that are listed there.

    Raises CheckpointError for a conversion that is not a merge of experts, and for parts that do not fit together.
    """
    for name, stored in parts.items():
        numbered = sorted((_number(model, index, converters, part) for part in stored), key=lambda part: part[:2])
        entry = _merged(index, name, numbered)
        for part in stored:
            del index.tensors[part]
        index.tensors[name] = entry


def _number(model: PreTrainedModel, index: TensorIndex, converters: Sequence[WeightConverter], stored: str) -> Part:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    for converter in converters:
        for place, pattern in enumerate(converter.source_patterns):
            found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored)
            merge, *rest = converter.operations
            is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0
            is_simple = all(isinstance(then, Concatenate) and then.dim == 1 for then in rest) and len(rest) <= 1
            if found is not None and found.groups() and is_merge and is_simple:
                return int(found.group(1)), place, index.entry(stored)
    raise CheckpointError(
        f"{index.root} stores {stored} in a form that transformers converts for {type(model).__name__}, but not "
        f"by stacking experts, which is all that is known here. Give a checkpoint that has this model's own names."
    )


def _merged(index: TensorIndex, name: str, parts: Sequence[Part]) -> TensorEntry:
    """[experts, rows of all places, ...] out of one tensor for each expert and place, in that order."""
    experts, places = sorted({part[0] for part in parts}), sorted({part[1] for part in parts})
    first = parts[0][2]
    whole = [(expert, place) for expert in range(len(experts)) for place in range(len(places))]
    if [part[:2] for part in parts] != whole:
        raise CheckpointError(f"{index.root} lacks some of the experts that {name} is made of.")
    for _, _, entry in parts:
        if (entry.shape[1:], entry.dtype) != (first.shape[1:], first.dtype) or entry.shape != first.shape:
            raise CheckpointError(
                f"{index.root} holds {entry.name} as {entry.dtype} {list(entry.shape)}, but {first.name}, which is a "
                f"part of the same {name}, as {first.dtype} {list(first.shape)}."
            )
    rows = first.shape[0]
    pieces = [_moved(piece, expert, place * rows) for expert, place, entry in parts for piece in entry.pieces]
    return TensorEntry(name, first.dtype, (len(experts), rows * len(places), *first.shape[1:]), tuple(pieces))


def _moved(piece: Piece, expert: int, row: int) -> Piece:
    offsets = (expert, piece.offsets[0] + row, *piece.offsets[1:])
    return piece._replace(offsets=offsets, shape=(1, *piece.shape))
