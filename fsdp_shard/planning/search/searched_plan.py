"""The answer of `plan search=true`: the fewest ranks that fit, and settings for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError
from fsdp_shard.planning.plan_result import PlannedModel, PlannedSettings, PlanResult, chosen_settings, switched_off
from fsdp_shard.planning.search.make_planner import planned_hardware, planner_for
from fsdp_shard.utils import format_count, format_size, say

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.planning.planned_run import PlannedRun


def plan_search(
    config: PlannedSettings, model: PlannedModel, model_config: PretrainedConfig, run: PlannedRun
) -> PlanResult:
    """Find the fewest ranks that fit, and settings for them."""
    from fsdp_shard.planning.search.pareto_front import front_figures, front_text, search_front

    launch, hardware = config.launch, planned_hardware(config, run.num_ranks)
    if hardware.memory_bytes is None:
        raise ConfigError(
            "search=true needs the memory of the devices; set device.memory, such as device.memory=80GiB, or a preset "
            "such as device=h100."
        )
    planner = planner_for(config, model_config, run, hardware)
    chosen = chosen_settings(config), switched_off(config)
    *fewer, most = launch.rank_counts
    counts = ", ".join([*map(str, fewer), format_count(most, "rank")])
    say(f"Planning {model.source} for {counts}, which may take minutes", sys.stderr)
    front = search_front(planner, run, hardware.memory_bytes, launch.rank_counts, chosen, launch.min_nodes)
    misfit = None
    if front.cheapest is None:
        misfit = (
            f"Nothing fits in {format_size(hardware.memory_bytes)} with launch.ranks={launch.ranks}; give more ranks, "
            f"or GPUs with more memory."
        )
    return PlanResult(model, front_text(front), front_figures(front), misfit, front)
