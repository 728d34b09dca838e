"""The answer of `plan`: the run as configured, and settings that would fit if it does not."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import InputError
from fsdp_shard.planning.devices import check_device
from fsdp_shard.planning.plan_result import PlannedModel, PlannedSettings, PlanResult, chosen_settings, switched_off
from fsdp_shard.planning.search.make_planner import planned_hardware, planner_for
from fsdp_shard.training import DistillConfig
from fsdp_shard.utils import format_size, say

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.planning.costs.step_cost import StepCost
    from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
    from fsdp_shard.planning.planned_run import PlannedRun
    from fsdp_shard.planning.search.planner import Planner


def plan_one(
    config: PlannedSettings, model: PlannedModel, model_config: PretrainedConfig, run: PlannedRun
) -> PlanResult:
    """Plan the run as configured, and find settings that would fit if it does not."""
    from fsdp_shard.planning.costs.step_report import step_figures, step_report
    from fsdp_shard.planning.costs.step_time import missing_figures
    from fsdp_shard.planning.report import figures, host_misfit, plan_report
    from fsdp_shard.planning.search.advice import advise
    from fsdp_shard.planning.search.advice_report import advice_figures, advice_lines

    hardware = planned_hardware(config, run.num_ranks)
    planner, memory_bytes = planner_for(config, model_config, run, hardware), hardware.memory_bytes
    plan, cost, host = _plans(planner, run)
    check_device(config.device, hardware, missing_figures(cost, hardware))
    lines, found, misfit = [plan_report(plan, memory_bytes, host)], None, None
    refused: str | None = None
    if isinstance(run.objective, DistillConfig):
        lines.append(_teacher_line(run.objective))
    try:
        planner.check(run)
        planner.check_model(run)
    except InputError as error:
        refused = str(error)
        lines.append(f"finetune would refuse these settings: {error}")
    if memory_bytes is not None and plan.peak_bytes is None:
        misfit = "Whether the run fits in device.memory is not known, as its activations could not be measured."
    lacks_host = host is not None and not host.fits(plan)
    if plan.fits(memory_bytes) is False or (lacks_host and memory_bytes is not None and plan.peak_bytes is not None):
        assert memory_bytes is not None, "else it is not known"
        needs = (
            f"The run needs {format_size(plan.needed_bytes)} on a rank, more than the {format_size(memory_bytes)} of "
            f"device.memory"
        )
        if plan.fits(memory_bytes) and host is not None:
            needs = f"The run does not fit in host memory: {host_misfit(plan, host)}"
        say(f"{needs}; looking for settings that fit, which may take minutes", sys.stderr)
        nodes, starts = config.launch.min_nodes, model.resumed_from is None
        chosen, off = chosen_settings(config), switched_off(config)
        found = advise(planner, run, memory_bytes, chosen, num_nodes=nodes, fixed=off, trains_other=starts)
        lines += advice_lines(found)
        shown = "the plan shows settings that fit" if found else "no settings were found that fit"
        misfit = f"{needs}; {shown}."
    elif lacks_host and host is not None:
        misfit = f"The run does not fit in host memory: {host_misfit(plan, host)}."
    dispatch_text, dispatched = _plan_dispatch(config, model, run.sequence_length)
    trace_text, traced = _trace(model_config, run, plan) if config.trace else ("", {})
    lines += ["", step_report(cost, hardware)]
    all_figures = {
        **figures(plan, memory_bytes, host),
        "refused": refused,
        "advice": advice_figures(found or ()),
        "step": step_figures(cost, hardware),
        **traced,
        **dispatched,
    }
    text = "\n".join(lines) + trace_text + dispatch_text
    return PlanResult(model, text, all_figures, misfit, memory=plan, memory_bytes=memory_bytes, host=host)


def _plans(planner: Planner, run: PlannedRun) -> tuple[MemoryPlan, StepCost, HostMemory | None]:
    """Return the plans of memory, of a step and of host memory; of several errors, raise the one that finetune does."""
    try:
        return planner.plan(run), planner.cost(run), planner.host_of(run)
    except InputError:
        planner.check(run)  # finetune looks first at which settings cannot be combined
        raise


def _teacher_line(distill: DistillConfig) -> str:
    """A line about a teacher's memory that is not planned."""
    if distill.is_precomputed:
        return (
            "The teacher runs before training, in the memory that is free then or that of "
            "objective.teacher_max_memory; neither that nor its time is in this plan."
        )
    return (
        "The teacher runs alongside: its memory is in this plan, and its passes are in the FLOPs of each rank, but not "
        "in the MFU. What it reads from the disk, and computes on the CPU of a GPU's rank, is not in the time."
    )


def _trace(config: PretrainedConfig, run: PlannedRun, plan: MemoryPlan) -> tuple[str, dict[str, Any]]:
    """Text and figures of the traced steps of rank 0."""
    from fsdp_shard.planning.trace.step_trace import trace_step
    from fsdp_shard.planning.trace.trace_report import trace_figures, trace_report

    trace, planned = trace_step(config, run), plan.per_rank[0].peak_bytes
    return f"\n\n{trace_report(trace, planned)}", {"trace": trace_figures(trace, planned)}


def _plan_dispatch(config: PlannedSettings, model: PlannedModel, length: int) -> tuple[str, dict[str, Any]]:
    """Text and figures of the device map of `generate`, if requested."""
    if config.dispatch.device_map is None:
        return "", {}
    from fsdp_shard.inference import (
        KVCacheBudget,
        device_name,
        inject_adapters,
        model_from_config,
        plan_dispatch,
        reserve_adapter_memory,
    )
    from fsdp_shard.models import load_config
    from fsdp_shard.planning.generation_plan import plan_generation

    budget = KVCacheBudget(config.train.micro_batch_size, length)
    model_config = load_config(model.source.config_directory, config.model.trust_remote_code)
    settings, adapters = config.dispatch, config.adapter_sources
    if adapters:
        settings = reserve_adapter_memory(settings, model.source, adapters)
    dispatched = model_from_config(model_config, settings)
    _, devices = plan_dispatch(dispatched, settings, budget)
    if adapters:
        inject_adapters(dispatched, adapters)
    stored = str(model_config.dtype or "float32").removeprefix("torch.")
    casts = settings.dtype not in ("keep", stored) or settings.quantize != "none"
    found = plan_generation(dispatched, devices, budget, casts=casts, quantize=settings.quantize)
    text = f"\n\n{devices.table()}\n{devices.describe()} of {budget}\n\n{found.describe(budget)}"
    strategy = settings.device_map  # or a complete map
    if settings.max_memory is None and isinstance(strategy, str) and strategy not in ("cpu", "disk"):
        text += "\nThe devices are those of this machine; dispatch.max_memory={0: 24GB, cpu: 64GB} plans for others."
    for device, num_bytes in (config.dispatch.budgets or {}).items():  # which the adapters are part of
        if found.peak_bytes.get(device_name(device), 0) > num_bytes:
            text += f"\nThat is more than the {format_size(num_bytes)} of dispatch.max_memory on {device_name(device)}."
    # The name of the key before `execution_device`, which programs may read.
    dispatch = {"main" if name == "execution_device" else name: value for name, value in asdict(devices).items()}
    return text, {"device_map": devices.devices, "dispatch": dispatch | {"generation": found.figures()}}
