"""Which tensor of a checkpoint fills which parameter of a model. Looks at names and shapes; reads values only to see
whether two stored copies of one tied tensor are equal. Knows no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.index import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    from fsdp_shard.checkpoint.index import TensorIndex


_NAMED = 4  # names in an error message; the rest is counted


def match_names(model: PreTrainedModel, index: TensorIndex) -> dict[str, str]:
    """Model name -> name in `index`, for every parameter and persistent buffer; tied parameters under their kept name.

    Names in `index` may be the model's own, those that transformers gives them in files (it renames some as it loads
    and saves), or lack or have `base_model_prefix`, as with a checkpoint of the bare model. Raises CheckpointError that
    names what is missing, not expected or of another shape, or tied here and not in the index.

    What transformers merges as it loads is one entry of `index` afterwards, under the model's own name.
    """
    aliases = tied_names(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    spellings = _spellings(model, index, shapes)
    found: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for name in shapes.keys() - aliases.keys():
        names = [name, *(alias for alias, kept in aliases.items() if kept == name)]
        stored = _distinct(index, [there for wanted in names for there in spellings.get(wanted, ())])
        if stored:
            found[name] = stored[0]
            copies += [(stored[0], other) for other in stored[1:]]
    _refuse_missing(index, [name for name in shapes if name not in found and name not in aliases])
    _refuse_shapes(index, shapes, found)
    _refuse_different_copies(index, copies)
    used = {*found.values(), *(other for _, other in copies)}
    _refuse_unexpected(index, model, [name for name in index.names if name not in used])
    return {name: found[name] for name in shapes if name in found}


def untie(model: PreTrainedModel, index: TensorIndex) -> None:
    """Give `model`, on meta, a parameter of its own for each tied name that `index` holds other values for.

    Only where the class of the config ties whatever it is told, as T5's does for models whose output head was trained
    apart: the stored values then decide, as in `from_pretrained`. Elsewhere `match_names` refuses the contradiction.
    """
    for alias, kept in tied_names(model).items():
        stored = _distinct(index, [name for name in (kept, alias) if name in index.tensors or name in index.aliases])
        if len(stored) == 2 and not index.same_bytes(*stored) and _always_ties(model):
            owner, _, name = alias.rpartition(".")
            tied = model.get_parameter(kept)
            own = type(tied)(tied.detach().clone(), requires_grad=tied.requires_grad)
            model.get_submodule(owner)._parameters[name] = own
            model.all_tied_weights_keys.pop(alias, None)


def _always_ties(model: PreTrainedModel) -> bool:
    """Whether the class of the model's config leaves it no word in what is tied."""
    config = model.config
    told = type(config).from_dict({**config.to_dict(), "tie_word_embeddings": False})
    return bool(told.tie_word_embeddings)


def _spellings(model: PreTrainedModel, index: TensorIndex, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Model name -> the names in `index` that mean it."""
    names = [*index.tensors, *index.aliases]
    if shapes.keys() >= {*names}:  # all as the model calls them: transformers takes 0.2 s to make its renaming rules
        return {name: [name] for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    spellings: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    for name in names:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
        if name in shapes:
            spellings.setdefault(name, []).append(name)
        elif converted is not None:
            parts.setdefault(renamed, []).append(name)
        else:
            spellings.setdefault(renamed, []).append(name)
    merge_parts(model, index, converters, parts)
    for name in parts:
        spellings.setdefault(name, []).append(name)
    return spellings


def _distinct(index: TensorIndex, names: Iterable[str]) -> list[str]:
    """The stored tensors that `names` mean, each once."""
    return list(dict.fromkeys(index.entry(name).name for name in names))


def _refuse_missing(index: TensorIndex, names: Sequence[str]) -> None:
    if names:
        raise CheckpointError(
            f"{index.root} lacks {_some(names)}, which the model of its config.json has; it holds "
            f"{_some(index.names)}. Either the checkpoint is incomplete or the config is another model's."
        )


def _refuse_shapes(index: TensorIndex, shapes: dict[str, tuple[int, ...]], found: dict[str, str]) -> None:
    wrong = [
        f"{name} {list(index.entry(stored).shape)} instead of {list(shapes[name])}"
        for name, stored in found.items()
        if index.entry(stored).shape != shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{index.root} holds shapes that do not fit the model of its config.json: {_some(wrong)}. "
            f"The weights and the config are of different models."
        )


def _refuse_unexpected(index: TensorIndex, model: PreTrainedModel, names: Sequence[str]) -> None:
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    # transformers once stored what it now computes.
    ignored.append(re.compile(r"rotary_emb\.inv_freq$"))
    left = [name for name in names if not any(pattern.search(name) for pattern in ignored)]
    if left:
        raise CheckpointError(
            f"{index.root} holds {_some(left)}, which {type(model).__name__} has no place for. "
            f"The weights and the config are of different models, or `architectures` in config.json is wrong."
        )


def _refuse_different_copies(index: TensorIndex, copies: Sequence[tuple[str, str]]) -> None:
    for kept, other in copies:
        if not index.same_bytes(kept, other):
            raise CheckpointError(
                f"{index.root} holds {kept} and {other} with different values, but its config.json ties them; "
                f"set tie_word_embeddings to false there."
            )


def _some(names: Sequence[str]) -> str:
    """The first few of `names`, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


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
