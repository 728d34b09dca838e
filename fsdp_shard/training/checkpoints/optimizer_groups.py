"""Optimizers of users' own training loops: states, options and parameter groups, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer, SparseAdam

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.distributed import Communicator, LocalShard, run_on_all
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.utils import tree_leaves

Optimizers = Optimizer | Mapping[str, Optimizer] | None


def by_name(given: Any) -> dict[str, Any]:
    """Objects by name; a single object gets the empty name."""
    return dict(sorted(given.items())) if isinstance(given, Mapping) else {"": given}


def bare_optimizers(given: Optimizers) -> dict[str, Optimizer]:
    """Optimizers by name, without the wrappers of other libraries."""
    found = {}
    for name, one in ({} if given is None else by_name(given)).items():
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):  # of accelerate
            if getattr(one, "state", inner.state) is not inner.state:
                break  # it adds states of its own, as Lookahead does
            one = inner
        if not isinstance(one, Optimizer):
            raise ConfigError(
                f"{type(one).__name__} is not a torch.optim.Optimizer; pass other objects as keyword arguments, "
                f"such as scheduler=scheduler."
            )
        found[name] = one
    return found


def check_savable(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise SaveError for an optimizer whose states `restore` could not fill."""
    for optimizer in optimizers.values():
        kind = type(optimizer).__name__
        why = None
        if isinstance(optimizer, LBFGS | SparseAdam):
            why = "restore() creates its states by a step with zero gradients, which it does not support"
        elif other := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
            why = f"it has a state under the key {other[0]!r}, and only those of parameters are saved"
        elif any(isinstance(one, Optimizer) and one.state is not optimizer.state for one in vars(optimizer).values()):
            why = "there is another optimizer in it, and only its own states would be saved"
        elif (slot := _nested_tensor(optimizer)) is not None:
            why = f"its state {slot!r} has tensors in it, and how the ranks divide them is not known"
        if why is not None:
            raise SaveError(
                f"{kind} cannot be saved as an optimizer: {why}. Pass it to save() and restore() as a keyword "
                f"argument instead, such as state_of_{kind.lower()}=optimizer, so that its state_dict() is saved."
            )


def _nested_tensor(optimizer: Optimizer) -> str | None:
    """The name of a state that is no tensor but has tensors in it, if any: each rank may have other ones."""
    for state in optimizer.state.values():
        for slot, value in state.items():
            if not isinstance(value, torch.Tensor) and any(torch.is_tensor(leaf) for leaf in tree_leaves(value)):
                return str(slot)
    return None


def optimizer_parts(
    optimizers: Mapping[str, Optimizer], shards: Mapping[str, LocalShard]
) -> tuple[dict[str, LocalShard], dict[str, Any], dict[str, Any]]:
    """The tensors of the states, the options of the groups, and the other entries of the states."""
    slots: dict[str, LocalShard] = {}
    options: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        options[name] = _options(optimizer, shards)
        prefix = slot_prefix(name)
        slots |= {prefix + key: shard for key, shard in checkpoint.optimizer_shards(optimizer, shards).items()}
        values |= {prefix + key: value for key, value in checkpoint.optimizer_values(optimizer, shards).items()}
    return slots, options, values


def slot_prefix(name: str) -> str:
    """The prefix of the names of an optimizer's states."""
    return f"{name}/" if name else ""


def _options(optimizer: Optimizer, shards: Mapping[str, LocalShard]) -> list[dict[str, Any]]:
    """The options of each parameter group, with the names of its parameters."""
    names = {id(shard.tensor): name for name, shard in shards.items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"{type(optimizer).__name__} has a parameter of shape {list(param.shape)} that the model does not "
                    f"have; make the optimizer of model.parameters() after the model is wrapped."
                )
    return [{**group, "params": [names[id(param)] for param in group["params"]]} for group in optimizer.param_groups]


def check_groups(
    saved: Any, optimizers: Mapping[str, Optimizer], shards: Mapping[str, LocalShard], directory: Path
) -> None:
    """Raise CheckpointError unless the parameter groups of the step are those of the optimizers."""
    if saved.keys() != optimizers.keys():
        raise CheckpointError(
            f"{directory} was saved with {_optimizers_in(saved)}, and restore() was given {_optimizers_in(optimizers)}."
        )
    for name, optimizer in optimizers.items():
        groups = _options(optimizer, shards)
        if [group["params"] for group in saved[name]] != [group["params"] for group in groups]:
            raise CheckpointError(
                f"{directory} was saved with another optimizer: its {len(saved[name])} parameter groups do not have "
                f"the parameters of the {len(groups)} of {type(optimizer).__name__}."
            )
        for before, now in zip(saved[name], groups, strict=True):
            if before.keys() != now.keys():
                raise CheckpointError(
                    f"{directory} was saved with another optimizer: its parameter groups have the options "
                    f"{format_names(before)}, those of {type(optimizer).__name__} {format_names(now)}."
                )


def _optimizers_in(given: Mapping[str, Any]) -> str:
    if not given:
        return "no optimizer"
    return "one optimizer" if "" in given else f"the optimizers {format_names(given)}"


def create_states(optimizers: Mapping[str, Optimizer], shards: Mapping[str, LocalShard], slots: Iterable[str]) -> None:
    """Create, with arbitrary values, the states that a step stores for each optimizer's parameters."""
    for name, optimizer in optimizers.items():
        optimizer.state.clear()
        prefix = slot_prefix(name)
        own = [slot.removeprefix(prefix) for slot in slots if slot.startswith(prefix)]
        members = {id(param) for group in optimizer.param_groups for param in group["params"]}
        # Under FSDP1, a rank may hold no elements of a parameter.
        found = [shards[key].tensor for key in (checkpoint.used_parameters(own, shards) if own else ())]
        if used := [param for param in found if id(param) in members and param.numel()]:
            checkpoint.create_state(optimizer, used)


@contextmanager
def kept_on_error(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Restore the optimizers' states if they cannot be filled; until then, both need memory."""
    before = {name: dict(one.state) for name, one in optimizers.items()}
    try:
        yield
    except BaseException:
        for name, one in optimizers.items():
            one.state.clear()
            one.state.update(before[name])
        raise


def load_slots(index: TensorIndex, stored: Sequence[str], slots: Mapping[str, LocalShard], ranks: Communicator) -> None:
    """Fill optimizer states from those `stored` in `index`; a collective.

    Raises:
        CheckpointError: On all ranks: a state is missing, has another shape, or belongs to no optimizer.
    """
    # A rank without elements of a parameter has no state for it; together, the ranks have all states.
    is_expected = ranks.all_reduce([float(name in slots) for name in stored], "max")
    extra = [name for name, expected in zip(stored, is_expected, strict=True) if not expected]
    run_on_all(ranks, lambda: checkpoint.check_slots(index, slots, extra))
    run_on_all(ranks, lambda: checkpoint.load_shards(index, slots))


def set_options(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Set the options of the parameter groups to those of a step."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if key != "params":
                are_tensors = isinstance(group[key], torch.Tensor) and isinstance(value, torch.Tensor)
                group[key] = value.to(group[key].device) if are_tensors else value


def set_values(optimizer: Optimizer, prefix: str, shards: Mapping[str, LocalShard], values: Mapping[str, Any]) -> None:
    """Make the non-tensor entries of the states those of a step, also where a state has no others."""
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}
    by_parameter = _by_parameter(prefix, shards, values)
    for name, shard in shards.items():
        # Under FSDP1, a rank may hold no elements of a parameter.
        if id(shard.tensor) not in members or not shard.tensor.numel():
            continue
        saved = by_parameter.get(name, {})
        if not saved and shard.tensor not in optimizer.state:
            continue
        state = optimizer.state[shard.tensor]
        for slot in [slot for slot, now in state.items() if not torch.is_tensor(now) and slot not in saved]:
            del state[slot]
        state.update(saved)


def _by_parameter(
    prefix: str, shards: Mapping[str, LocalShard], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The entries of one optimizer's states as parameter -> slot -> value."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        path = key.removeprefix(prefix)
        for parts in range(1, path.count(".") + 1):  # a slot may have dots, too
            name, *slot = path.rsplit(".", parts)
            if key.startswith(prefix) and name in shards:
                found.setdefault(name, {})[".".join(slot)] = value
                break
    return found


def format_names(names: Iterable[str]) -> str:
    """Format names for an error message, sorted."""
    return ", ".join(sorted(names)) or "none"
