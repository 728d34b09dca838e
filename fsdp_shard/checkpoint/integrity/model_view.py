"""Shows two checkpoints under the names of their model, if they store its tensors differently, to compare them.

A writer may store tied weights under one name or under all of them, experts stacked or apart, and values that
transformers computes or none. transformers builds the models on the meta device, and the loading code matches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.load_checks import model_of_config
from fsdp_shard.checkpoint.io import has_file
from fsdp_shard.checkpoint.keys.quantized_weights import quantization
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.checkpoint.model_files import CONFIG
from fsdp_shard.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def under_model_names(
    one: TensorIndex, two: TensorIndex, locations: Sequence[Location]
) -> tuple[TensorIndex, TensorIndex] | None:
    """Return both indexes with the names that their tensors have in the model; the caller closes them.

    Args:
        one: A checkpoint.
        two: The other one.
        locations: Where each of them is. If only one has a config.json, it describes both.

    Returns:
        The indexes; None if the names in files are all there is to compare: without a config of transformers' own, for
        models of different classes, quantized weights and adapters, and if tensors do not fit the model.
    """
    if not one.tensors or not two.tensors or all(location.is_adapter for location in locations):
        return None
    if quantization(one) is not None or quantization(two) is not None:
        return None
    with ExitStack() as opened:
        views = [
            opened.enter_context(
                replace(index, tensors=dict(index.tensors), aliases=dict(index.aliases), parts=(), notes=())
            )
            for index in (one, two)
        ]
        try:
            if (models := _models(locations)) is None:
                return None
            for view, model in zip(views, models, strict=True):
                _rename(view, model)
            for view, other, model in zip(views, reversed(views), models, strict=True):
                _add_computed(view, other, model)
        except (CheckpointError, ModelError):
            return None
        opened.pop_all()
    return views[0], views[1]


def _models(locations: Sequence[Location]) -> tuple[PreTrainedModel, PreTrainedModel] | None:
    """Build the model of each checkpoint; None unless both have one, of the same class."""
    homes = [location.expected_config_directory for location in locations]
    configured = [home for home in homes if has_file(home, CONFIG)]
    if not configured:
        return None
    one, two = (model_of_config(home if home in configured else configured[0]) for home in homes)
    return None if one is None or two is None or type(one) is not type(two) else (one, two)


def _rename(index: TensorIndex, model: PreTrainedModel) -> None:
    """Give the tensors of an index the names that they have in the model, converted, and tied as they are there."""
    from fsdp_shard.checkpoint.keys.matching import stored_spellings
    from fsdp_shard.models import tied_names

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    own = {stored[0]: name for name, stored in stored_spellings(model, index, shapes).items() if len(stored) == 1}
    entries = [entry._replace(name=own.get(name, name)) for name, entry in index.tensors.items()]
    tensors = {entry.name: entry for entry in entries}
    aliases = {own.get(alias, alias): own.get(kept, kept) for alias, kept in index.aliases.items()}
    twins: dict[str, list[str]] = {}
    for alias, kept in tied_names(model).items():
        twins.setdefault(kept, [kept]).append(alias)
    for names in twins.values():
        stored = next((name for name in names if name in tensors), None)
        if stored is not None:
            aliases = dict.fromkeys(names, stored) | aliases
    index.tensors.clear()
    index.tensors.update(tensors)
    index.aliases.clear()
    index.aliases.update({alias: kept for alias, kept in aliases.items() if alias not in tensors and kept in tensors})


def _add_computed(index: TensorIndex, other: TensorIndex, model: PreTrainedModel) -> None:
    """Add what only `other` stores, if transformers computes it for a checkpoint that lacks it."""
    from fsdp_shard.checkpoint.keys.converted_tensors import computed_entry
    from fsdp_shard.checkpoint.keys.matching import computed_values

    held = model.state_dict(keep_vars=True)
    known = {*index.tensors, *index.aliases}
    missing = [name for name in other.tensors if name in held and name not in known]
    for name, values in computed_values(model, missing).items():
        index.tensors[name] = computed_entry(index, name, values, values.detach)
