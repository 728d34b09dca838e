"""The state of any torch optimizer as named tensors, with each rank's part as flat ranges.

A state with the shape of its parameter is sharded like the parameter. A scalar (a step count) is written by the rank
that holds the parameter's first element: under FSDP1, a rank may hold no elements of a parameter, and then has no state
for it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import to_torch
from fsdp_shard.checkpoint.sharded_state.load_shards import may_cast
from fsdp_shard.distributed import LocalShard, is_first_copy, shard_of
from fsdp_shard.errors import CheckpointError


def optimizer_shards(optimizer: Optimizer, shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    """This rank's part of the optimizer state.

    Args:
        optimizer: The optimizer. If its state is not sharded like its parameters, it has a method `state_shards`, and
            `state_values` for `optimizer_values`.
        shards: This rank's parameters, by name.

    Returns:
        The states by `PARAMETER.SLOT`; every rank lists all states that any rank may hold.
    """
    own: Callable[[], dict[str, LocalShard]] | None = getattr(optimizer, "state_shards", None)
    if own is not None:
        return own()
    with torch.no_grad():
        return {
            f"{name}.{slot}": _state_shard(f"{name}.{slot}", shard, value)
            for name, shard in shards.items()
            for whole, state in sorted(optimizer.state.get(shard.tensor, {}).items())
            for slot, value in plain_tensors(whole, state)
        }


def plain_tensors(slot: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return a state as plain tensors or DTensors: itself, the variable parts of a quantized one, or nothing.

    Args:
        slot: The name of the state; parts of a quantized one are SLOT.PART.
        value: The state.
    """
    if not isinstance(value, torch.Tensor):
        return []
    if isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__"):
        return [(slot, value)]
    parts, _ = value.__tensor_flatten__()
    return [(f"{slot}.{part}", getattr(value, part)) for part in parts if part != "qmap"]


def used_parameters(slots: Iterable[str], names: Iterable[str]) -> set[str]:
    """The parameters among `names` with one of `slots`; the others never had a gradient.

    All of them if none has a state: the states then belong to another optimizer.
    """
    known = {slot.rsplit(".", parts)[0] for slot in slots for parts in range(1, slot.count(".") + 1)}
    return known.intersection(names) or set(names)


def create_state(optimizer: Optimizer, params: Iterable[torch.Tensor] | None = None) -> None:
    """Make an optimizer allocate its state by a step with zero gradients and rate, which changes no parameter.

    torch's `set_optimizer_state_dict` does the same: there is no public way to allocate empty state. Gradients are
    kept. An optimizer without a learning rate (`lr`) may decay the parameters: fill them afterwards.

    A second call creates states that appear in the second step only.

    Args:
        optimizer: The optimizer, which has no other state yet.
        params: The parameters to allocate state for; None for all.
    """
    chosen = None if params is None else {id(param) for param in params}
    rated = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    gradients = [(param, param.grad) for group in optimizer.param_groups for param in group["params"]]
    try:
        for group, rate in rated:
            group["lr"] = torch.tensor(0.0) if isinstance(rate, torch.Tensor) else 0.0
        for param, _ in gradients:
            param.grad = torch.zeros_like(param) if chosen is None or id(param) in chosen else None
        optimizer.step()
    finally:
        for param, gradient in gradients:
            param.grad = gradient
        for group, rate in rated:
            group["lr"] = rate


def check_slots(index: TensorIndex, expected: Mapping[str, LocalShard], extra: Sequence[str]) -> None:
    """Raise CheckpointError unless `index` holds the states that this rank expects, with their shapes, and no `extra`.

    `extra` are the states in `index` that no rank expects.
    """
    missing = sorted(expected.keys() - index.tensors.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has {min(extra)}, which this optimizer does not keep"
        raise CheckpointError(
            f"The optimizer state in {index.root} {what} ({len(missing)} states missing, {len(extra)} not expected of "
            f"{len(index.names)}): it was saved by another optimizer or for another model, or its optimizer creates "
            f"states after its second step. Use that run's optim settings."
        )
    for name, shard in expected.items():
        entry = index.entry(name)
        if entry.shape != shard.shape:
            raise CheckpointError(
                f"{index.root}: state {name} has shape {list(entry.shape)}, expected {list(shard.shape)}."
            )
        if not may_cast(to_torch(entry.dtype), shard.data.dtype):
            raise CheckpointError(
                f"{index.root}: state {name} is stored as {entry.dtype}, expected {shard.data.dtype}."
            )


def optimizer_values(optimizer: Optimizer, shards: Mapping[str, LocalShard]) -> dict[str, Any]:
    """The non-tensor entries of the optimizer state, such as step counts, by `PARAMETER.SLOT`."""
    own: Callable[[], dict[str, Any]] | None = getattr(optimizer, "state_values", None)
    if own is not None:
        return own()
    return {
        f"{name}.{slot}": value
        for name, shard in shards.items()
        for slot, value in sorted(optimizer.state.get(shard.tensor, {}).items())
        if not isinstance(value, torch.Tensor)
    }


def _state_shard(name: str, shard: LocalShard, value: torch.Tensor) -> LocalShard:
    """This rank's part of the state `name` for the parameter of `shard`.

    The state is sharded like the parameter, or a DTensor with its own sharding, or has its own shape if the parameter
    is not sharded. `data` is a copy if the state is not contiguous.
    """
    held, param = _contiguous(value), shard.tensor
    if isinstance(held, DTensor) and not (isinstance(param, DTensor) and _is_placed_like(held, param)):
        if any(placement.is_partial() for placement in held.placements):
            raise CheckpointError(
                f"The optimizer keeps {name} as a DTensor with the placements {tuple(held.placements)}, of which each "
                f"rank has a summand only, so that it cannot be saved. Redistribute it, such as with "
                f"redistribute(placements=[Replicate()])."
            )
        own = shard_of(held, writes=is_first_copy(held.device_mesh, held.placements))
        return replace(own, tensor=value)
    if held.ndim == 0 and shard.shape:
        holds_first = shard.writes and shard.start == 0 and shard.data.numel() > 0
        return LocalShard(value, held.view(-1), 0, (), writes=holds_first)
    local = held.to_local() if isinstance(held, DTensor) else held
    if hasattr(local, "__tensor_flatten__"):
        raise CheckpointError(
            f"The optimizer keeps {name} as {type(local).__name__}, which quantizes the elements of a rank together, "
            f"so that no other number of ranks could continue from it. Keep the states of a sharded model unquantized, "
            f"or train with optim=adamw8bit of fsdp-shard's finetune, whose blocks do not depend on the ranks."
        )
    if local.numel() == shard.data.numel():
        return LocalShard(value, shard.view_of(held), shard.start, shard.shape, shard.writes, shard.box)
    if shard.data.numel() != math.prod(shard.shape):
        raise CheckpointError(
            f"The optimizer keeps {name} of shape {list(value.shape)} for a parameter of shape {list(shard.shape)} of "
            f"which this rank has {shard.data.numel()} elements: how the ranks divide it is not known, so that it "
            f"cannot be saved. Use an optimizer whose states have the shape of the parameters, or are DTensors."
        )
    return LocalShard(value, held.view(-1), 0, tuple(value.shape), shard.writes)


def _is_placed_like(state: DTensor, param: DTensor) -> bool:
    """Whether the ranks divide a state in the same way as its parameter."""
    return (
        state.shape == param.shape
        and tuple(state.placements) == tuple(param.placements)
        and state.device_mesh == param.device_mesh
    )


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    """A state, or a copy of one whose elements are not in a row in memory, such as a transposed or expanded one."""
    if not isinstance(value, DTensor):
        return value.contiguous()
    local = value.to_local()
    if local.is_contiguous():
        return value
    stride = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(value.ndim))
    return DTensor.from_local(
        local.contiguous(), value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=stride
    )


def write_back(shard: LocalShard) -> None:
    """Copy `data` into a state of which it is a copy, once it was filled."""
    local = shard.tensor.to_local() if isinstance(shard.tensor, DTensor) else shard.tensor
    if not isinstance(local, torch.Tensor) or local.is_contiguous():
        return
    values = shard.data.view(local.shape)
    for axis, stride in enumerate(local.stride()):
        if stride == 0:  # one element in memory for all along the axis
            local, values = local.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    local.copy_(values)
