"""Peak memory of each rank of a run, from configs alone. The model exists on the meta device only.

For each rank, the plan computes the shards of parameters, gradients and optimizer state exactly. It simulates memory at
each point of a step, an evaluation and a save, unit by unit (`step/simulators`), from what one micro-batch keeps
(`step/recording`). The peak is the highest of these snapshots and counts tensors; the overhead of a GPU
(`device_overhead`) is shown separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models, sharding
from fsdp_shard.planning.memory_plan import MemoryPlan, RankMemory
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.plan_cache import PlanCache, without_activations, without_loss, without_ranks
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.device_overhead import device_overhead
from fsdp_shard.planning.step.shard_state import (
    RankPart,
    ShardState,
    part_of_rank,
    shard_states,
    staged_bytes,
    unit_shards,
)
from fsdp_shard.planning.step.snapshot import DIRECTIONS, EVA, LOADING, TEMPORARIES, ZEROS
from fsdp_shard.planning.step.step_snapshots import SimulatedStep, plan_step
from fsdp_shard.training import check_adapter_mesh


def plan_memory(config: PretrainedConfig, run: PlannedRun, cache: PlanCache | None = None) -> MemoryPlan:
    """Plan the memory of a run.

    Args:
        config: The transformers config of the model.
        run: The settings of the run.
        cache: Results of earlier plans of the same model, which are reused and extended.

    Returns:
        The plan.

    Raises:
        ConfigError: The settings do not work for this model and number of ranks, or cannot be planned.
        ModelError: No blocks are found in the model.
    """
    sharding.check_mesh(run.shard, run.num_ranks)
    check_adapter_mesh(run.adapter, run.shard)
    cache = PlanCache() if cache is None else cache
    model, blocks, units = built_model(config, run, cache)
    of_model = (without_loss(run.model), run.adapter)
    cache.get("check", (*of_model, without_ranks(run.shard)), lambda: sharding.check_shardable(model, run.shard))
    sharding.check_context_parallel(config, model, run.model, run.shard, run.sequence_length)
    part = cache.get(
        "part", (*of_model, without_activations(run.shard)), lambda: part_of_rank(config, run, units, model)
    )
    of_state = (*of_model, run.optim, run.train.ema_decay, without_activations(run.shard), run.num_shards, run.on_gpu)
    shards = cache.get("shards", of_state, lambda: unit_shards(part, run))
    states = cache.get("state", of_state, lambda: shard_states(shards, part, run))
    step = plan_step(config, part, run, cache)
    staged = staged_bytes(part, states, run) if run.saves_asynchronously else [0] * run.num_ranks
    per_rank = [
        _rank_memory(rank, states[_shard_of(rank, run)], run, step, staging) for rank, staging in enumerate(staged)
    ]
    return MemoryPlan(
        model_class=type(model).__name__,
        num_params=sum(unit.num_params for unit in units),
        num_trained=sum(unit.num_trained for unit in units),
        blocks=tuple(blocks),
        per_rank=tuple(per_rank),
        problem=step.problem,
        tree=tuple(sharding.unit_tree(model, run.shard, run.num_ranks)) if run.shard.explain else (),
        overhead=_overhead(part, run, per_rank),
        shards=shards,
        tensor_ranks=run.shard.tensor_parallel,
        uncounted=step.uncounted,
    )


def built_model(
    config: PretrainedConfig, run: PlannedRun, cache: PlanCache
) -> tuple[PreTrainedModel, list[models.Block], tuple[sharding.Unit, ...]]:
    """Build the training model on meta; return it with its blocks and its units."""

    def build() -> tuple[PreTrainedModel, list[models.Block], tuple[sharding.Unit, ...]]:
        model, _ = build_planned(config, run.model, run.adapter, run.model.dtype, run.shard)
        blocks = [
            replace(block, num_params=_num_weights(model, block))
            for block in models.no_split_blocks(model, run.shard.blocks)
        ]
        return model, blocks, sharding.plan_units(model, run.shard)

    return cache.get("model", (without_loss(run.model), run.adapter, without_activations(run.shard)), build)


def _num_weights(model: PreTrainedModel, block: models.Block) -> int:
    """`block.num_params`, counting weights instead of bytes where weights are quantized."""
    module = model.get_submodule(block.fqn)
    inside = {} if block.direct else models.weights_per_parameter(module)
    return block.num_params + sum(count - module.get_parameter(name).numel() for name, count in inside.items())


def _rank_memory(rank: int, state: ShardState, run: PlannedRun, step: SimulatedStep, staging: int) -> RankMemory:
    """The memory of one rank; `staging` is the size of its copy for asynchronous saves."""
    is_offloaded = run.shard.cpu_offload
    total = state.parameters + state.gradients + state.optimizer + state.average
    rank_bytes = {} if is_offloaded else {"optimizer": state.optimizer, "average": state.average}
    if run.saves_every and not run.on_gpu:  # one memory; a save that nothing follows touches no page of the copy
        rank_bytes["staging"] = staging
    host = state.pinned + state.optimizer + state.average if is_offloaded else 0
    teacher = step.teacher
    host += 0 if teacher is None else teacher.host_bytes
    return RankMemory(
        rank,
        state.parameters,
        state.gradients,
        state.optimizer,
        step.unsharded_bytes,
        step.activations_bytes,
        host_bytes=total if is_offloaded else 0,
        staging_bytes=staging,
        needed_host_bytes=host + staging + step.offloaded_bytes if run.on_gpu else 0,
        reference_bytes=state.parameters if run.has_sharded_reference and not is_offloaded else 0,
        average_bytes=state.average,
        teacher_bytes=0 if teacher is None else teacher.held_bytes,
        shared_snapshots=step.snapshots,
        highest_snapshots=step.highest_snapshots,
        rank_bytes={name: num for name, num in rank_bytes.items() if num},
        rank_bytes_by_phase=_rank_bytes_by_phase(state, run, step.directions[rank] if step.directions else 0),
    )


def _rank_bytes_by_phase(state: ShardState, run: PlannedRun, directions: int) -> dict[str, dict[str, int]]:
    """Bytes by phase and term that a rank holds in one phase only; `directions` are the bytes of `eva`."""
    found: dict[str, dict[str, int]] = {EVA: {DIRECTIONS: directions}} if directions else {}
    if run.shard.cpu_offload:
        return found
    updates = {TEMPORARIES: state.update_temporaries} if state.update_temporaries else {}
    found |= {"load": {LOADING: state.padding}} if state.padding else {}
    # A step on zero gradients creates the optimizer state before it is read.
    resumed = {ZEROS: state.updated_parameters, "optimizer": state.optimizer, **updates}
    return found | {"resume": resumed, "optimizer": updates}


def _shard_of(rank: int, run: PlannedRun) -> int:
    """The index of a rank's shard in its replica; ranks that divide layers have the same rows."""
    return rank // run.shard.tensor_parallel % run.num_shards


def _overhead(part: RankPart, run: PlannedRun, per_rank: Sequence[RankMemory]) -> Mapping[str, int]:
    """Memory of the fullest rank's GPU outside of tensors; empty on CPUs."""
    peaks = [rank.peak_bytes for rank in per_rank]
    if not run.on_gpu or None in peaks:
        return {}
    shard = run.shard
    divided = (shard.replicas, shard.tensor_parallel, shard.expert_parallel, shard.context_parallel, run.num_shards)
    num_params = sum(1 for _ in part.model.parameters())
    num_groups = 1 + sum(ranks > 1 for ranks in divided) if run.num_ranks > 1 else 0
    num_groups += 2 if type(shard.reshard_after_forward) is int else 0  # the dimensions of an additional mesh
    return device_overhead(max(peak for peak in peaks if peak is not None), 4 * num_params, num_groups)
