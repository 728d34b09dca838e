"""The state of each shard of a planned run: parameters, gradients, optimizer state and averages, in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import sharding
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.divided_model import divide_model, with_expert_units
from fsdp_shard.planning.step.optimizer import exchange_bytes, state_bytes_of_each, step_bytes, whole_updates
from fsdp_shard.planning.step.recording.recorder import pinned_bytes
from fsdp_shard.planning.step.unit_holdings import UnitShards
from fsdp_shard.utils import balanced_partition

# A copy for a save has up to seven tensors per parameter: its weights, their average, and its optimizer state
# (most tensors in `adamw8bit`). Each starts at a multiple of 64 bytes (`checkpoint/sharded_state/staging.py`).
_STAGED_APART = 7 * 64
_AVERAGE_SIZE = 4  # float32


@dataclass(frozen=True)
class ShardState:
    """One shard's state in bytes, its optimizer's temporary memory, and the copy that a save may make.

    Attributes:
        parameters: Parameters, with the padding of flat ones.
        gradients: Gradients, once they are reduced.
        optimizer: Optimizer state; if whole parameters are updated, that of those that the rank owns.
        average: The average of the trained weights, if there is one.
        update_temporaries: Maximum of what an update needs temporarily.
        staged: The copy that an asynchronous save makes: trained weights, optimizer state, average and buffers.
        pinned: Pinned host memory of offloaded parameters and gradients.
        updated_parameters: Those parameters that have gradients.
        padding: The largest parameter that `fully_shard` copies when it pads its shards.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    update_temporaries: int
    staged: int
    pinned: int
    updated_parameters: int
    padding: int


@dataclass(frozen=True)
class RankPart:
    """A replica rank's part of a model before sharding: all of it, or its part of divided layers and experts.

    Attributes:
        model: The model on meta, in its stored dtypes.
        units: The units, the root last.
        experts: FQNs of the units of divided experts.
    """

    model: PreTrainedModel
    units: Sequence[sharding.Unit]
    experts: frozenset[str] = frozenset()


def part_of_rank(
    config: PretrainedConfig, run: PlannedRun, units: Sequence[sharding.Unit], model: PreTrainedModel
) -> RankPart:
    """Return a rank's part of a model before sharding; `units` are those of the whole `model`, the root last."""
    if run.shard.tensor_parallel == run.shard.expert_parallel == 1:
        return RankPart(model, units)
    divided, _ = build_planned(config, run.model, run.adapter, run.model.dtype, run.shard)
    experts = divide_model(divided, run.shard)
    return RankPart(divided, with_expert_units(units, experts), experts)


def _local_shapes(
    part: RankPart, shapes: Mapping[str, sharding.Shape], run: PlannedRun
) -> list[dict[str, sharding.Shape]]:
    """The local shape of every parameter for each shard."""
    shard, num_shards = run.shard, run.num_shards
    if not part.experts:
        return shard.local_shapes(shapes, part.units, num_shards)
    dense, experts = dict(shapes), dict[str, sharding.Shape]()
    for unit in part.units:
        if unit.fqn in part.experts:
            experts |= {name: dense.pop(name) for name in unit.parameters}
    of_dense = shard.local_shapes(dense, part.units, num_shards)
    of_experts = shard.local_shapes(experts, part.units, num_shards // shard.expert_parallel)
    return [held | of_experts[index // shard.expert_parallel] for index, held in enumerate(of_dense)]


def unit_shards(part: RankPart, run: PlannedRun) -> UnitShards:
    """The parameters of each shard of a replica, and which of them have gradients and updates."""
    model, units = part.model, part.units
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    trained = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    unused = sharding.unused_by_text(model)
    updated = trained.keys() - unused
    if run.shard.flattens_units:  # a unit has one gradient, if any parameter is trained and any is used
        used = (unit.parameters for unit in units if not unused.issuperset(unit.parameters))
        updated = {name for names in used if not trained.keys().isdisjoint(names) for name in names} & trained.keys()
    local_shapes = _local_shapes(part, shapes, run)
    owned: Sequence[Sequence[str]] | None = None
    if run.optim.needs_full_params:
        parts = balanced_partition(sorted(trained), run.num_shards, trained.__getitem__)
        owned = [[name for name in names if name in updated] for names in parts]
    with_gradient = list(updated if run.shard.is_sharded else trained)  # DDP's buckets hold all
    if run.shard.flattens_units:  # one gradient per unit, which covers frozen parameters too
        flat = [(number, unit) for number, unit in enumerate(units) if not updated.isdisjoint(unit.parameters)]
        with_gradient = [name for number, unit in flat for name in (*unit.parameters, f"(padding of unit {number})")]
    return UnitShards(
        units,
        local_shapes,
        shapes,
        {name: param.dtype for name, param in model.named_parameters()},
        padding_dtype=getattr(torch, run.model.dtype),
        with_gradient=frozenset(with_gradient),
        trained=frozenset(trained),
        updated=frozenset(updated),
        owned=owned,
        optim=run.optim,
        flattens_units=run.shard.flattens_units,
        has_average=run.train.ema_decay is not None,
    )


def shard_states(shards: UnitShards, part: RankPart, run: PlannedRun) -> list[ShardState]:
    """The state of each shard; equal shards are computed once."""
    updates: dict[str, int] = {}
    if run.optim.needs_full_params:
        in_order = [name for name, param in part.model.named_parameters() if param.requires_grad]
        updates = whole_updates(run.optim, in_order, shards.shapes, shards.dtypes, on_gpu=run.on_gpu)
    buffers = 2 * sum(buffer.nbytes for buffer in part.model.buffers())  # for weights and average
    by_id = {id(local): local for local in shards.local_shapes}  # shards may share a dict
    contents = {key: tuple(local.items()) for key, local in by_id.items()}
    known: dict[object, ShardState] = {}
    states = []
    for index, local in enumerate(shards.local_shapes):
        key = contents[id(local)], () if shards.owned is None else tuple(shards.owned[index])
        if key not in known:
            known[key] = _shard_state(shards, index, run, buffers, updates)
        states.append(known[key])
    return states


def _shard_state(
    shards: UnitShards, index: int, run: PlannedRun, buffers: int, updates: Mapping[str, int]
) -> ShardState:
    """The state of a shard.

    Args:
        shards: All shards.
        index: The number of the shard.
        run: The run.
        buffers: Bytes of the model's buffers in a save.
        updates: Temporary bytes of each parameter's update, for optimizers that need whole ones.
    """
    local, shapes, dtypes = shards.local_shapes[index], shards.shapes, shards.dtypes
    trained = {name: shape for name, shape in local.items() if name in shards.trained}
    gradients = {name: shape for name, shape in local.items() if name in shards.with_gradient}
    parts = shards.parts_with_state(trained)
    updated = parts if shards.owned is None else {name: shapes[name] for name in shards.owned[index]}
    foreach = run.on_gpu and run.shard.wrapper != "fsdp2"  # DTensors are updated one by one
    optimizer, temporaries = 0, 0
    if updated:
        optimizer, temporaries = step_bytes(run.optim, updated, shapes, dtypes, uses_foreach=foreach)
    if shards.owned is not None:
        held = {name: prod(shape) * dtypes[name].itemsize for name, shape in trained.items()}
        temporaries = exchange_bytes(shards.owned, index, held, shapes, dtypes, updates, on_gpu=run.on_gpu)
    average = 0 if run.train.ema_decay is None else _AVERAGE_SIZE * sum(map(prod, trained.values()))
    return ShardState(
        parameters=shards.num_bytes(local),
        gradients=shards.num_bytes(gradients),
        optimizer=optimizer,
        average=average,
        update_temporaries=temporaries,
        staged=shards.num_bytes(trained) + optimizer + average + buffers + len(trained) * _STAGED_APART,
        pinned=sum(
            pinned_bytes(shards.num_bytes({name: shape}))
            for part_of_state in (local, gradients)
            for name, shape in part_of_state.items()
        ),
        updated_parameters=shards.num_bytes(parts),
        padding=_padded_bytes(local, shapes, dtypes, run),
    )


def _padded_bytes(
    local: Mapping[str, sharding.Shape],
    shapes: Mapping[str, sharding.Shape],
    dtypes: Mapping[str, torch.dtype],
    run: PlannedRun,
) -> int:
    """Bytes of the largest shard that has fewer rows than the others and is padded to match."""
    if run.shard.flattens_units or not run.shard.is_sharded:
        return 0
    sizes = (
        prod(shape) * dtypes[name].itemsize
        for name, shape in local.items()
        if prod(shape) < prod(sharding.padded_shape(shapes[name], run.num_shards))
    )
    return max(sizes, default=0)


def staged_bytes(part: RankPart, states: Sequence[ShardState], run: PlannedRun) -> list[int]:
    """Bytes of the copy that an asynchronous save may make on each rank: what this rank writes.

    The first replica writes everything that replicas share, but under DDP they divide the tensors.
    """
    of_shards = [state.staged - (0 if run.saves_optimizer else state.optimizer) for state in states]
    if run.shard.is_sharded:
        num_first = run.num_shards * run.shard.tensor_parallel
        by_rank = [of_shards[rank // run.shard.tensor_parallel] for rank in range(num_first)]
        return by_rank + [0] * (run.num_ranks - num_first)
    trained = {name: param for name, param in part.model.named_parameters() if param.requires_grad}
    shapes = {name: tuple(param.shape) for name, param in trained.items()}
    of_optimizer = state_bytes_of_each(run.optim, shapes, {name: param.dtype for name, param in trained.items()})
    average_size = 0 if run.train.ema_decay is None else _AVERAGE_SIZE
    sizes = [0] * run.num_ranks
    for number, (name, param) in enumerate(part.model.named_parameters(remove_duplicate=False)):
        if name in trained:
            of_param = param.numel() * (param.element_size() + average_size) + of_optimizer[name] * run.saves_optimizer
            sizes[number % run.num_ranks] += of_param + _STAGED_APART
    buffers = of_shards[0] - sum(sizes)
    return [size + buffers for size in sizes]
