"""Optimizers of users' own training loops: states, options and parameter groups, by parameter name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.distributed import Communicator, LocalShard, run_on_all
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.training.checkpoints.checkpointer_document import bits_sums
from fsdp_shard.training.optim.build import needs_closure
from fsdp_shard.utils import tree_leaves

_SMALL_BYTES = 1 << 20
# Class and state: what a step computes before it reads it, of the elements that the rank holds.
_COMPUTED_ANEW = {("Adafactor", "RMS")}  # of transformers
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
        if (why := why_not_savable(optimizer)) is not None:
            kind = type(optimizer).__name__
            raise SaveError(
                f"{kind} cannot be saved as an optimizer: {why}. Pass it to save() and restore() as a keyword "
                f"argument instead, such as state_of_{kind.lower()}=optimizer, so that its state_dict() is saved."
            )


def why_not_savable(optimizer: Optimizer) -> str | None:
    """Why the states of an optimizer cannot be saved and filled again, if so."""
    if isinstance(optimizer, LBFGS | SparseAdam):
        return "a resume creates its states by a step with zero gradients, which it does not support"
    if needs_closure(optimizer):
        return "a resume creates its states by a step with zero gradients, and its step() requires a closure"
    if other := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        return f"it has a state under the key {other[0]!r}, and only those of parameters are saved"
    if any(isinstance(one, Optimizer) and one.state is not optimizer.state for one in vars(optimizer).values()):
        return "there is another optimizer in it, and only its own states would be saved"
    if (slot := _nested_tensor(optimizer)) is not None:
        return f"its state {slot!r} has tensors in it, and how the ranks divide them is not known"
    return None


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


def state_digests(
    optimizers: Mapping[str, Optimizer], shards: Mapping[str, LocalShard], *, of_any_size: bool
) -> dict[str, int | None]:
    """Digests of the states that must be equal on all ranks, for `first_difference`; None without elements.

    Only one rank saves them: numbers, and tensors that are not sharded.

    Args:
        optimizers: The optimizers, by name.
        shards: This rank's parameters, by name.
        of_any_size: Include tensors of more than 1 MiB, such as states of replicated parameters.
    """
    found: dict[str, int | None] = {}
    on_gpu: list[tuple[str, torch.Tensor]] = []
    for prefix, optimizer in ((slot_prefix(name), one) for name, one in optimizers.items()):
        members = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, shard in shards.items():
            if id(shard.tensor) not in members:
                continue
            key = f"states of {type(optimizer).__name__} for {prefix}{name} that are not sharded"
            digest = xxhash.xxh3_64()
            for slot, value in sorted(optimizer.state.get(shard.tensor, {}).items()):
                if (type(optimizer).__name__, slot) in _COMPUTED_ANEW:
                    continue
                digest.update((slot if isinstance(value, torch.Tensor) else f"{slot}={value!r}").encode())
                for tensor in _whole_tensors(slot, value, shard):
                    if not (of_any_size or tensor.nbytes <= _SMALL_BYTES):
                        continue
                    if tensor.device.type == "cpu":
                        digest.update(checkpoint.tensor_bytes(tensor))
                    else:
                        on_gpu.append((key, tensor))
            found[key] = digest.intdigest() if shard.data.numel() else None
    for (key, _), number in zip(on_gpu, bits_sums([tensor for _, tensor in on_gpu]), strict=True):
        found[key] = None if (own := found[key]) is None else (own + number) % 2**64
    return found


def _whole_tensors(slot: str, value: Any, shard: LocalShard) -> Iterator[torch.Tensor]:
    """The tensors of a state, flat, of which each rank has all elements."""
    for _, tensor in checkpoint.plain_tensors(slot, value):
        if isinstance(tensor, DTensor):
            if all(placement.is_replicate() for placement in tensor.placements):
                yield tensor.to_local().detach().contiguous().view(-1)
        elif tensor.ndim == 0 or shard.data.numel() == math.prod(shard.shape):
            yield tensor.detach().contiguous().view(-1)


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
    """Create, with arbitrary values, the states that a step stores for each optimizer's parameters.

    Called again, it creates those that appear in the second step only.
    """
    for name, optimizer in optimizers.items():
        prefix = slot_prefix(name)
        own = [slot.removeprefix(prefix) for slot in slots if slot.startswith(prefix)]
        members = {id(param) for group in optimizer.param_groups for param in group["params"]}
        # Under FSDP1, a rank may hold no elements of a parameter.
        found = [shards[key].tensor for key in (checkpoint.used_parameters(own, shards) if own else ())]
        if used := [param for param in found if id(param) in members and param.numel()]:
            checkpoint.create_state(optimizer, used)


@contextmanager
def cleared_states(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Clear the optimizers' states, and restore them and the options if they cannot be filled.

    Until then, both need memory.
    """
    before = {name: (dict(one.state), [dict(group) for group in one.param_groups]) for name, one in optimizers.items()}
    for one in optimizers.values():
        one.state.clear()
    try:
        yield
    except BaseException:
        for name, one in optimizers.items():
            states, groups = before[name]
            one.state.clear()
            one.state.update(states)
            for group, options in zip(one.param_groups, groups, strict=True):
                group.update(options)
        raise


def load_slots(
    index: TensorIndex,
    stored: Sequence[str],
    create: Callable[[int], None],
    created: Callable[[], Mapping[str, LocalShard]],
    ranks: Communicator,
) -> None:
    """Create optimizer states, and fill them from those `stored` in `index`; a collective.

    Args:
        index: The optimizer state of a step.
        stored: The names of the states in it.
        create: Creates states by a step; called with 0, and if some are missing, again with 1.
        created: Returns this rank's states.
        ranks: The ranks.

    Raises:
        CheckpointError: On all ranks: a state is missing, has another shape, or belongs to no optimizer.
    """
    for attempt in range(2):  # some states appear in the second step, such as the gradient of the step before
        run_on_all(ranks, functools.partial(create, attempt))
        slots = run_on_all(ranks, created)
        # A rank without elements of a parameter has no state for it; together, the ranks have all states.
        is_expected = ranks.all_reduce([float(name in slots) for name in stored], "max")
        if not (extra := [name for name, expected in zip(stored, is_expected, strict=True) if not expected]):
            break
    run_on_all(ranks, lambda: checkpoint.check_slots(index, slots, extra))
    run_on_all(ranks, lambda: checkpoint.load_shards(index, slots))
    for shard in slots.values():
        checkpoint.write_back(shard)


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
