"""Matches the tensors of a checkpoint to the parameters of a model, by name and shape.

Values are read only to check whether two stored copies of a tied tensor are equal.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import from_torch_name, kind_of, torch_name
from fsdp_shard.checkpoint.keys.converted_tensors import computed_entry, convert_tensors
from fsdp_shard.checkpoint.keys.tied_weights import HEADS, has_same_bytes
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import (
    build_class_on_meta,
    computed_tensor,
    ignored_missing_keys,
    ignored_unexpected_keys,
    tied_names,
)
from fsdp_shard.utils import first_few

_DECLARE_TIES = frozenset({"huggingface", "sharded"})  # formats that store a tied tensor under one name
_MAX_COMPUTED = 1 << 22  # elements of a computed tensor; a config may request any number


@dataclass(frozen=True)
class MatchedNames:
    """The stored tensor that fills each tensor of a model.

    Attributes:
        stored: Name of a parameter or persistent buffer -> name in the index; for tied parameters, only the kept name.
        note: Lines about what an adapter's merge dropped and about unused stored tensors; empty if there are none.
        unused: The names of stored tensors that the model lacks.
        computed: Names in the index of values that transformers computes.
    """

    stored: dict[str, str]
    note: str
    unused: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()


def match_names(model: PreTrainedModel, index: TensorIndex) -> MatchedNames:
    """Match each parameter and persistent buffer of a model to a tensor of a checkpoint.

    Names in the checkpoint may be the model's own, those that transformers uses in files (it renames some on load and
    save), or have or lack `base_model_prefix`, as in a checkpoint of the bare model.

    Args:
        model: The model, which may be on meta.
        index: The checkpoint. Tensors that transformers converts on load (such as experts) become entries under the
            model's own names, and so do parameters that it computes and that are not stored.

    Returns:
        The matched names. Tensors that `from_pretrained` also skips (a pre-training head) are noted.

    Raises:
        CheckpointError: A tensor is missing, has another shape or kind of numbers, is a part that the model's module
            lacks, or is tied in the model but not in the checkpoint; the message names it.
    """
    aliases = tied_names(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    spellings = stored_spellings(model, index, shapes)
    found: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for name in shapes.keys() - aliases.keys():
        names = [name, *(alias for alias, kept in aliases.items() if kept == name)]
        stored = _distinct(index, [spelling for wanted in names for spelling in spellings.get(wanted, ())])
        if stored:
            _refuse_foreign_tie(index, [spelling for wanted in names for spelling in spellings.get(wanted, ())])
            found[name] = stored[0]
            copies += [(stored[0], other) for other in stored[1:]]
    used = {*found.values(), *(other for _, other in copies)}
    unused = _unused(model, [name for name in index.names if name not in used])
    missing = [name for name in shapes if name not in found and name not in aliases]
    computed = computed_values(model, missing)
    for name, values in computed.items():
        index.tensors[name] = computed_entry(index, name, values, values.detach)
        found[name] = name
    _refuse_missing(index, [name for name in missing if name not in found], unused)
    _refuse_shapes(index, shapes, found)
    _refuse_kinds(index, model, found)
    _refuse_other_parts(index, model, used, unused)
    for kept, other in copies:
        if not has_same_bytes(index, kept, other):
            raise CheckpointError(
                f"{index.root} holds {kept} and {other} with different values, but its config.json ties them; "
                f"set tie_word_embeddings to false there."
            )
    notes = list(index.notes)
    if unused:
        notes.append(f"{index.path}: left out {first_few(unused)}, which {type(model).__name__} does not have")
    matched = {name: found[name] for name in shapes if name in found}
    return MatchedNames(matched, "\n".join(notes), tuple(unused), tuple(computed))


def untie(model: PreTrainedModel, index: TensorIndex) -> None:
    """Give a model on meta a separate parameter for each tied name with different values in the checkpoint.

    This applies only if the config class ties them regardless of its settings, as T5's does for models whose output
    head was trained separately: the stored values then decide, as in `from_pretrained`. Otherwise, `match_names` raises
    an error.
    """
    for alias, kept in tied_names(model).items():
        stored = _distinct(index, [name for name in (kept, alias) if name in index.tensors or name in index.aliases])
        if len(stored) == 2 and not has_same_bytes(index, *stored) and _always_ties(model):
            owner, _, name = alias.rpartition(".")
            tied = model.get_parameter(kept)
            own = type(tied)(tied.detach().clone(), requires_grad=tied.requires_grad)
            setattr(model.get_submodule(owner), name, own)
            model.all_tied_weights_keys.pop(alias, None)


def _always_ties(model: PreTrainedModel) -> bool:
    """Whether the class of the model's config ignores `tie_word_embeddings`."""
    config = model.config
    untied = type(config).from_dict({**config.to_dict(), "tie_word_embeddings": False})
    return bool(untied.tie_word_embeddings)


def _conversion_mapping(model: PreTrainedModel) -> list[Any]:
    """The renamings and converters of transformers. They go by classes of modules, which `fully_shard` replaces.

    There are none for classes outside of transformers.
    """
    own_class: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if is_sharded and own_class.__module__.startswith("transformers."):
        model = build_class_on_meta(own_class, model.config)
    return list(get_model_conversion_mapping(model))


def stored_spellings(
    model: PreTrainedModel, index: TensorIndex, shapes: dict[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Return the names in `index` that refer to each name in the model.

    Stored tensors that transformers converts are replaced in `index` by entries for the results.
    """
    names = [*index.tensors, *index.aliases]
    if shapes.keys() >= {*names}:  # all equal the model's: transformers needs 0.2 s to create its renaming rules
        return {name: [name] for name in names}
    mapping = _conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    spellings: dict[str, list[str]] = {}
    sources: dict[str, list[tuple[str, str]]] = {}  # stored names and their patterns, by the first resulting name
    for name in names:
        renamed, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
        if name not in shapes and pattern is not None:
            sources.setdefault(renamed, []).append((name, pattern))
        else:
            spellings.setdefault(name if name in shapes else renamed, []).append(name)
    for name in convert_tensors(model, index, converters, sources):
        spellings.setdefault(name, []).append(name)
    return spellings


def _distinct(index: TensorIndex, names: Iterable[str]) -> list[str]:
    """The stored tensors to which `names` refer, each once."""
    return list(dict.fromkeys(index.entry(name).name for name in names))


def _refuse_missing(index: TensorIndex, names: Sequence[str], unused: Sequence[str]) -> None:
    if names:
        raise CheckpointError(
            f"{index.root} lacks {first_few(names)}, which the model of its config.json has; it holds "
            f"{first_few(unused or index.names)}. Either the checkpoint is incomplete or the config is another "
            f"model's."
        )


def _refuse_shapes(index: TensorIndex, shapes: dict[str, tuple[int, ...]], found: dict[str, str]) -> None:
    wrong = [
        f"{name} {list(shape)} instead of {list(shapes[name])}"
        for name, other in found.items()
        if (shape := index.entry(other).shape) != shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{index.root} holds shapes that do not fit the model of its config.json: {first_few(wrong)}. "
            f"The weights and the config are of different models."
        )


def _refuse_foreign_tie(index: TensorIndex, names: Sequence[str]) -> None:
    """Reject a tensor that is not stored, and that a header or manifest ties to another one but the model does not.

    An output head is allowed: models with a separate head are saved while it is the embedding. Other formats name
    tensors that share bytes.
    """
    if index.format not in _DECLARE_TIES or any(name in index.tensors or name.endswith(HEADS) for name in names):
        return
    raise CheckpointError(
        f"{index.root} does not hold {names[0]}, and says that it is tied to {index.aliases[names[0]]}, which the "
        f"model of its config.json does not do. Either the checkpoint is damaged or the config is another model's."
    )


def _refuse_kinds(index: TensorIndex, model: PreTrainedModel, found: dict[str, str]) -> None:
    """Reject integers stored for weights, which transformers would cast silently."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in found:
            continue
        entry, wanted = index.entry(found[name]), str(tensor.dtype).removeprefix("torch.")
        if kind_of(entry.dtype) != kind_of(from_torch_name(wanted)):
            raise CheckpointError(
                f"{index.root} holds {entry.name} as {torch_name(entry.dtype)}, where the model has {wanted}: the "
                f"checkpoint is damaged, or its weights are quantized in a way that it does not say."
            )


def _refuse_other_parts(
    index: TensorIndex, model: PreTrainedModel, used: Collection[str], unused: Sequence[str]
) -> None:
    """Reject a bias, scale or adapter of a layer whose weight is used: the layer would compute something else."""
    layers = {name.removesuffix("weight") for name in used if name.endswith(".weight")}
    wrong = [
        name
        for name in unused
        if not name.endswith(".num_batches_tracked")
        and any(name[: at + 1] in layers for at, letter in enumerate(name) if letter == ".")
    ]
    if wrong:
        raise CheckpointError(
            f"{index.root} holds {first_few(wrong)}, which belongs to layers that {type(model).__name__} computes "
            f"without it. The config is another model's, or the weights are quantized or adapted in a way that is not "
            f"known."
        )


def _unused(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The stored `names` without a tensor in the model that should be reported."""
    # transformers once stored what it now computes: masks, position_ids, and frequencies in each layer.
    computed = [re.escape(name) for name, _ in model.named_buffers()]
    patterns = [r"rotary_emb\.inv_freq$", *ignored_unexpected_keys(model), *(rf"(?:^|\.){name}$" for name in computed)]
    ignored = re.compile("|".join(patterns))
    prefix = f"{model.base_model_prefix}."  # absent in files of the bare model
    return [name for name in names if not ignored.search(name) and not ignored.search(prefix + name)]


def computed_values(model: PreTrainedModel, missing: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the values of the `missing` tensors that `from_pretrained` computes."""
    patterns = [re.compile(pattern) for pattern in ignored_missing_keys(model)]
    names = [name for name in missing if any(pattern.search(name) for pattern in patterns)]
    sizes = {name: tensor.numel() for name, tensor in model.state_dict(keep_vars=True).items()}
    values = {name: computed_tensor(model, name) for name in names if sizes[name] <= _MAX_COMPUTED}
    return {name: tensor for name, tensor in values.items() if tensor is not None}
