"""The arguments of `Checkpointer.save`, and one rank's part of the step that they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_shard.checkpoint import StepContent
from fsdp_shard.distributed import Communicator, LocalShard
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.sharding import ModuleShards, ShardedModel, modules_with_extra_state, shards_of
from fsdp_shard.training.checkpoints.checkpointer_document import (
    DOCUMENT,
    CheckpointerDocument,
    RankDocument,
    StateTensors,
    random_state,
    text_digest,
)
from fsdp_shard.training.checkpoints.optimizer_groups import by_name, check_savable, format_names, optimizer_parts
from fsdp_shard.training.checkpoints.side_files import side_files
from fsdp_shard.training.checkpoints.step_reader import Stateful

Models = nn.Module | ShardedModel | Mapping[str, nn.Module | ShardedModel]
_EXTRA_STATES = "get_extra_state() of modules"  # the name of a state


class SaveArguments(NamedTuple):
    """The arguments of `Checkpointer.save`, with the optimizers by name."""

    step: int
    model: Models
    optimizers: Mapping[str, Optimizer]
    states: Mapping[str, Stateful | None]
    extra: Any
    extra_per_rank: Any
    metrics: Mapping[str, float]


class StepParts(NamedTuple):
    """One rank's part of a step; `document` lacks the parts of other ranks."""

    document: CheckpointerDocument
    rank_document: RankDocument
    weights: dict[str, LocalShard]
    aliases: dict[str, str]
    slots: dict[str, LocalShard]
    tensors: StateTensors
    files: dict[str, bytes]

    def to_content(self, of_ranks: list[RankDocument], *, has_slots: bool, is_main: bool) -> StepContent:
        """Return the content of the step directory, on rank 0 with the documents of all ranks."""
        document = dataclasses.replace(self.document, ranks=of_ranks, has_slots=has_slots)
        files = {**self.files, DOCUMENT: document.to_json()} if is_main else {}
        return StepContent(
            weights=self.weights,
            aliases=self.aliases,
            optimizer={**self.slots, **self.tensors.shards},
            model_files=files,
        )


def collect(given: SaveArguments, processor: Any, ranks: Communicator) -> StepParts:
    """Collect this rank's part of a step, without communication: `tensors.digests` must agree on all ranks."""
    tensors, found = StateTensors(ranks), shards_of_all(given.model, ranks)
    shards = found.shards
    check_savable(given.optimizers)
    tensors.digests["the number of the step"] = given.step
    tensors.add_digests_of(found)
    slots, options, scalars = optimizer_parts(given.optimizers, shards)
    document = CheckpointerDocument(given.step, dict(given.metrics))
    # If parameters are sharded, a rank may lack the states of those of which it holds no elements.
    is_flat = any(map(_is_part, shards.values()))
    tensors.digests["what states the optimizer has"] = 0 if is_flat else text_digest(sorted(slots))
    document.groups = tensors.add_shared(options, "the options of the optimizer")
    stateful = given_states(given.states, given.model)
    document.states = {name: tensors.add_shared(one.state_dict(), name) for name, one in sorted(stateful.items())}
    document.extra = tensors.add_own(given.extra, "extra") if ranks.is_main else None
    groups = [group for one in given.optimizers.values() for group in one.param_groups]
    trained = {id(param) for group in groups for param in group["params"]}
    # With several models, the config of one of them would describe the wrong weights.
    model = nn.Module() if isinstance(given.model, Mapping) else given.model
    return StepParts(
        document=document,
        rank_document=RankDocument(
            state=tensors.add_own({"random": random_state(), "extra": given.extra_per_rank}, f"rank-{ranks.rank}"),
            scalars=tensors.add_own(scalars, f"rank-{ranks.rank}.values"),
        ),
        weights={name: shard if id(shard.tensor) in trained else _as_buffer(shard) for name, shard in shards.items()},
        aliases=found.aliases,
        slots=slots,
        tensors=tensors,
        files=side_files(model, processor) if ranks.is_main else {},
    )


def shards_of_all(models: Models, ranks: Communicator) -> ModuleShards:
    """This rank's shards of a module, or of several modules whose names prefix those of the parameters."""
    shards: dict[str, LocalShard] = {}
    aliases: dict[str, str] = {}
    replicated: list[str] = []
    models_of: dict[str, str] = {}
    for name, module in by_name(models).items():
        found, prefix = shards_of(module, ranks), f"{name}." if name else ""
        for key in (*found.shards, *found.aliases):
            if (other := models_of.setdefault(prefix + key, name)) != name:
                raise ConfigError(
                    f"{prefix}{key} is the name of a parameter or buffer of both models {other!r} and {name!r}, as the "
                    f"name of the model stands before it; give one of the two models another name."
                )
        shards |= {prefix + key: shard for key, shard in found.shards.items()}
        aliases |= {prefix + key: prefix + kept for key, kept in found.aliases.items()}
        replicated += [prefix + key for key in found.replicated]
    return ModuleShards(shards, aliases, replicated)


def given_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step as numbers; tensors with one element are converted."""
    figures = {}
    for name, value in metrics.items():
        try:
            figures[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SaveError(f"metrics has {name}={value!r}, which is not a number.") from error
    return figures


class _ExtraStates:
    """The return values of the modules' `get_extra_state()`, which are neither parameters nor buffers."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def state_dict(self) -> Any:
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def check(self, state: Any) -> None:
        """Raise CheckpointError unless `state` is of the same modules."""
        if state.keys() != self._modules.keys():
            raise CheckpointError(
                f"The step has {_EXTRA_STATES} {format_names(state)}, and the model has modules with such a state "
                f"{format_names(self._modules)}; expected the same."
            )

    def load_state_dict(self, state: Any) -> None:
        for name, module in self._modules.items():
            module.set_extra_state(state[name])


def given_states(states: Mapping[str, Stateful | None], models: Models) -> dict[str, Stateful]:
    """The objects to save or restore by name, except those that are None, and the extra states of modules."""
    given = {name: one for name, one in states.items() if one is not None}
    for name, one in given.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise ConfigError(
                f"{name}={one!r} has no state_dict() and load_state_dict(), by which an object is saved and restored; "
                f"give data as extra."
            )
    extras = {
        f"{name}.{part}" if name else part: module
        for name, model in by_name(models).items()
        for part, module in modules_with_extra_state(model).items()
    }
    return {**given, _EXTRA_STATES: _ExtraStates(extras)} if extras else given


def check_extra_states(given: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the saved extra states, if any, are of the modules in a result of `given_states`."""
    if isinstance(extras := given.get(_EXTRA_STATES), _ExtraStates):
        extras.check(saved[_EXTRA_STATES])


def _is_part(shard: LocalShard) -> bool:
    """Whether a plain tensor is a shard of a parameter, as under FSDP1."""
    return not isinstance(shard.tensor, DTensor) and shard.data.numel() != math.prod(shard.shape)


def _as_buffer(shard: LocalShard) -> LocalShard:
    """Mark a tensor that no optimizer updates as a buffer, which a background save copies at once."""
    return dataclasses.replace(shard, tensor=shard.tensor.detach())
