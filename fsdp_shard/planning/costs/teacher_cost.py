"""The cost that a teacher running alongside adds to a step: its forward passes, which are not divided among ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsdp_shard.inference import DispatchConfig, model_from_config
from fsdp_shard.models import load_config
from fsdp_shard.planning.costs.block_flops import ModelCosts
from fsdp_shard.planning.costs.model_facts import measured_costs
from fsdp_shard.planning.costs.step_cost import StepCost
from fsdp_shard.planning.plan_cache import PlanCache
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.teacher_pass import teacher_of
from fsdp_shard.training import DistillConfig


def with_teacher(cost: StepCost, run: PlannedRun, cache: PlanCache) -> StepCost:
    """Add the cost of a teacher that runs alongside, if there is one on the device.

    This adds the FLOPs of its passes, the weights they read, and the weights that are copied to the device from host
    memory or disk. MFU does not count these FLOPs, because they train nothing. Disk reads are not counted.

    Args:
        cost: The cost of a step.
        run: The settings of the run.
        cache: Values that plans of the model share.
    """
    teacher = teacher_of(run, cache)
    if teacher is None or not teacher.is_on_device:
        return cost
    assert isinstance(run.objective, DistillConfig)
    make = partial(_teacher_costs, run.objective, trust_remote_code=run.model.trust_remote_code)
    costs, problem = cache.get("teacher costs", (run.objective.teacher, run.model.trust_remote_code), make)
    num_passes = run.num_micro_batches
    flops = None
    if costs is not None and cost.flops is not None:
        passes = (costs.outside, *costs.blocks.values())
        of_row = sum(each.forward.at(run.sequence_length, is_packed=run.is_packed) for each in passes)
        flops = cost.flops + num_passes * run.num_read_rows * of_row
    return replace(
        cost,
        flops=flops,
        memory_bytes=cost.memory_bytes + num_passes * teacher.weights_bytes,
        to_device_bytes=cost.to_device_bytes + num_passes * teacher.streamed_bytes,
        problem=cost.problem or (None if problem is None else f"the teacher: {problem}"),
    )


def _teacher_costs(distill: DistillConfig, *, trust_remote_code: bool) -> tuple[ModelCosts | None, str | None]:
    """FLOPs of the teacher, or why they cannot be measured."""
    config = load_config(distill.locate(fetch_weights=False).config_directory, trust_remote_code)
    return measured_costs(lambda: model_from_config(config, DispatchConfig(trust_remote_code=trust_remote_code)))
