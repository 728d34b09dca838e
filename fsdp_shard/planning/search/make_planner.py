"""Makes the planner of a command, with the hardware in its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.planning.devices import Hardware, hardware_of
from fsdp_shard.planning.plan_result import PlannedSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.planning.memory_plan import HostMemory
    from fsdp_shard.planning.planned_run import PlannedRun
    from fsdp_shard.planning.search.planner import Planner


def planned_hardware(config: PlannedSettings, num_ranks: int) -> Hardware:
    """The hardware of a run with `num_ranks` ranks over all machines."""
    nodes = config.launch.min_nodes
    return hardware_of(config.device, ranks_per_node=num_ranks // nodes if config.launch.max_nodes > 1 else None)


def planner_for(
    config: PlannedSettings, model_config: PretrainedConfig, run: PlannedRun, hardware: Hardware
) -> Planner:
    """Return the planner for `run` and other runs of its model; it knows step times if it knows the hardware."""
    from fsdp_shard.planning.costs.step_time import step_time
    from fsdp_shard.planning.memory_plan import HostMemory
    from fsdp_shard.planning.search.planner import Planner
    from fsdp_shard.planning.step.teacher_pass import check_budgets
    from fsdp_shard.training import DistillConfig

    def host(candidate: PlannedRun) -> HostMemory | None:
        known = planned_hardware(config, candidate.num_ranks)
        if known.host_memory_bytes is None:
            return None
        per_machine = candidate.num_ranks // config.launch.min_nodes
        return HostMemory(known.host_memory_bytes, min(per_machine, known.num_per_machine or per_machine))

    def check_together(candidate: PlannedRun) -> None:
        if candidate.on_gpu and isinstance(candidate.objective, DistillConfig):
            check_budgets(candidate.objective, candidate.num_ranks // config.launch.min_nodes)

    on_gpu = "cpu" not in (config.launch.device, config.device.planned_kind)  # else the plan is for GPUs elsewhere
    # A measured run had the ranks that it had.
    nodes = (config.launch.min_nodes, config.launch.max_nodes) if config.run is None else (1, 1)
    planner = Planner(model_config, on_gpu=on_gpu, check_together=check_together, host=host, nodes=nodes)

    def seconds(candidate: PlannedRun) -> float | None:
        found = step_time(planner.cost(candidate), planned_hardware(config, candidate.num_ranks))
        return None if found is None else found.seconds

    if hardware.is_whole and step_time(planner.cost(run), hardware) is not None:
        planner.seconds = seconds
    return planner
