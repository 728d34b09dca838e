"""Each rank's share of a unit, and how often a step gathers and reduces it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_shard import sharding
from fsdp_shard.planning.costs.model_facts import ModelFacts
from fsdp_shard.planning.planned_run import PlannedRun


@dataclass(frozen=True)
class UnitShare:
    """A rank's share of parameters that are gathered together, and how often they are gathered.

    Attributes:
        num_chunks: Number of ranks that the parameters are divided over.
        stride: Distance between neighbors among those ranks.
        gathered_bytes: Bytes of the rank's chunk, in the dtype of the gather.
        stored_bytes: Bytes of the chunk as it is stored.
        reduced_bytes: Bytes of the gradient chunk, in the dtype of the reduction.
        num_gathers: Gathers per step over all those ranks.
        num_small_gathers: Gathers per step over the ranks of `shard.reshard_after_forward=N` only.
        num_reductions: Reductions per step.
        is_expert: Whether the parameters are experts divided over ranks.
    """

    num_chunks: int
    stride: int
    gathered_bytes: int
    stored_bytes: int
    reduced_bytes: int
    num_gathers: int
    num_small_gathers: int
    num_reductions: int
    is_expert: bool


def unit_shares(facts: ModelFacts, run: PlannedRun) -> Iterator[UnitShare]:
    """Yield the shares of all units; experts divided over ranks are separate units, one per module."""
    units = facts.units(run.shard)
    for unit, has_backward in zip(units, _have_backward(facts, run, units), strict=True):
        parts: dict[str, list[str]] = {"": []}
        for name in unit.parameters:
            is_divided = run.shard.expert_parallel > 1 and facts.expert_plan.get(name) == sharding.DIVIDED_BY_EXPERTS
            parts.setdefault(name.rpartition(".")[0] if is_divided else "", []).append(name)
        for experts, names in parts.items():
            num_gathers, num_small = _num_gathers(facts, run, unit, is_expert=bool(experts), has_backward=has_backward)
            yield _share(facts, run, unit, names, (num_gathers, num_small), is_expert=bool(experts))


def _have_backward(facts: ModelFacts, run: PlannedRun, units: Sequence[sharding.Unit]) -> list[bool]:
    """Whether each unit is gathered for the backward pass, which units before the first trained parameter do not have.

    FSDP2 also gathers earlier units that it prefetches for a backward pass. FSDP1 also gathers the quantized weights of
    the first trained layer, which are units before that layer's own.
    """
    *inner, root = units
    first = next((number for number, unit in enumerate(inner) if unit.num_trained), len(inner))
    while 0 < first < len(inner) and inner[first - 1].is_quantized:
        first -= 1
    embedding = {id(param) for param in facts.model.get_input_embeddings().parameters() if param.requires_grad}
    if any(id(facts.model.get_parameter(name)) in embedding for name in root.parameters):
        first = 0
    num_ahead = 0 if run.shard.flattens_units else run.shard.prefetch_backward or 1
    return [*(number >= first - num_ahead for number in range(len(inner))), True]


def _share(
    facts: ModelFacts,
    run: PlannedRun,
    unit: sharding.Unit,
    names: list[str],
    num_gathers: tuple[int, int],
    *,
    is_expert: bool,
) -> UnitShare:
    shard = run.shard
    stride = shard.expert_parallel if is_expert else shard.tensor_parallel
    num_chunks = run.num_ranks // (shard.replicas * stride) if shard.is_sharded else 1
    shapes = {name: _local_shape(facts, run, name) for name in names}

    def chunk(chosen: Mapping[str, tuple[int, ...]]) -> int:
        return shard.all_gather_numel(chosen, unit.dtype, num_chunks)

    if shard.flattens_units:  # gradients cover all of a unit, even if only part of it is trained
        elements, stored = chunk(shapes), max((facts.params[name].itemsize for name in names), default=0)
        reduced = elements if any(facts.params[name].is_trained for name in names) else 0
        gathered_bytes = elements * (stored if unit.is_quantized else sharding.itemsize(unit.dtype))
        stored_bytes = elements * stored
    else:
        sizes = [0, 0, 0]  # gathered, stored, trained
        for (gathered_size, stored_size, is_trained), chosen in _alike(facts, unit, shapes).items():
            elements = chunk(chosen)
            sizes = [
                sizes[0] + elements * gathered_size,
                sizes[1] + elements * stored_size,
                sizes[2] + elements * is_trained,
            ]
        gathered_bytes, stored_bytes, reduced = sizes
    reduced_bytes = reduced * sharding.itemsize(shard.reduce_dtype)
    figures = gathered_bytes, stored_bytes, reduced_bytes
    return UnitShare(num_chunks, stride, *figures, *num_gathers, run.num_reductions, is_expert)


def _alike(
    facts: ModelFacts, unit: sharding.Unit, shapes: Mapping[str, tuple[int, ...]]
) -> dict[tuple[int, int, bool], dict[str, tuple[int, ...]]]:
    """`shapes` grouped by gathered and stored bytes per element, and by whether the parameter is trained."""
    computed, found = sharding.itemsize(unit.dtype), dict[tuple[int, int, bool], dict[str, tuple[int, ...]]]()
    for name, shape in shapes.items():
        param = facts.params[name]
        gathered = computed if param.is_floating and not unit.is_quantized else param.itemsize
        found.setdefault((gathered, param.itemsize, param.is_trained), {})[name] = shape
    return found


def _num_gathers(
    facts: ModelFacts, run: PlannedRun, unit: sharding.Unit, *, is_expert: bool, has_backward: bool
) -> tuple[int, int]:
    """Gathers of a unit per step: over all ranks that divide it, and over those of `reshard_after_forward=N`."""
    shard, times = run.shard, run.num_micro_batches
    every, calls = shard.reshard_after_forward, facts.num_calls(unit.fqn)
    if not shard.is_sharded:
        return 0, 0
    if shard.wrapper == "fsdp1":
        if every is False:  # without a reduction, gathered parameters stay for the next micro-batch
            return times if shard.sync_every_micro_batch else 1, 0
        if not unit.fqn:
            return times, 0
        return (calls + has_backward) * times, 0  # in the backward pass they stay until all calls are done
    is_kept = not is_expert and unit.fqn in ("", facts.head)
    if is_kept or every is False:  # until the backward pass of the last call
        return (calls if has_backward else 1) * times, 0
    if not has_backward:
        return (calls * times, 0) if every is True else (times, (calls - 1) * times)
    return (2 * calls * times, 0) if every is True else (calls * times, calls * times)


def _local_shape(facts: ModelFacts, run: PlannedRun, name: str) -> tuple[int, ...]:
    """The part of a parameter that the fullest rank has before sharding."""
    shape, num_ranks = facts.params[name].shape, run.shard.tensor_parallel
    if run.shard.expert_parallel > 1 and facts.expert_plan.get(name) == sharding.DIVIDED_BY_EXPERTS:
        return shape[0] // run.shard.expert_parallel, *shape[1:]
    style = facts.tensor_plan.get(name) if num_ranks > 1 else None
    if style in (*sharding.COLUMN_STYLES, sharding.EMBEDDING_STYLE):
        return -(-shape[0] // num_ranks), *shape[1:]
    if style in sharding.ROW_STYLES and len(shape) > 1:
        return *shape[:-1], -(-shape[-1] // num_ranks)
    return shape
