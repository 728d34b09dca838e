"""The plan of a run from its settings: its model, the memory of each rank, and with a device map that of `generate`.

The checks need no torch, so that a mistake shows at once; `plan_run` loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint import CHECKPOINTS, Location, Store
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.models import ModelConfig, check_model_config
from fsdp_shard.planning.config import DeviceConfig, PlanDataConfig, PlanSavingConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, OptimConfig, TrainConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.inference import DispatchConfig
    from fsdp_shard.planning.memory import MemoryPlan, PlannedRun


class PlannedSettings(Protocol):
    """The config of a plan, as far as planning uses it."""

    run_dir: str
    launch: LaunchConfig
    model: ModelConfig
    data: PlanDataConfig
    shard: ShardConfig
    objective: ObjectiveConfig
    adapter: AdapterConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: PlanSavingConfig
    device: DeviceConfig
    dispatch: DispatchConfig
    trace: bool

    @property
    def source(self) -> Location:
        """What `model.path` leads to."""


@dataclass(frozen=True)
class PlannedModel:
    """The `source` of a model, the `step` that it is of, if any, and a `note` if it could not be compared with that."""

    source: Location
    step: Path | None = None
    note: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """What a run would need.

    Attributes:
        model: Its model.
        text: The plan for people.
        figures: Those of result.json.
    """

    model: PlannedModel
    text: str
    figures: Mapping[str, Any]


def check_plan(config: PlannedSettings) -> None:
    """Raise an InputError for what can be found wrong with a plan before torch is loaded.

    Example:
        >>> fs.check_plan(config)  # doctest: +SKIP
    """
    config.adapter.check_installed()
    config.optim.check_installed()
    source = planned_model(config).source
    check_model_config(source.directory)
    source.check_unquantized()


def plan_run(config: PlannedSettings) -> RunPlan:
    """Plan what each rank of `finetune` would need, and with `dispatch.device_map` where `generate` puts blocks.

    Args:
        config: The settings of `plan`. Of the model only its config is read.

    Returns:
        The plan.

    Raises:
        ModelError, ConfigError: The model cannot be built, or the settings do not fit it.

    Example:
        >>> plan = fs.plan_run(config)  # doctest: +SKIP
        >>> plan.figures["peak_bytes"]  # doctest: +SKIP
        8437268480
    """
    from fsdp_shard.distributed import uses_gpus
    from fsdp_shard.models import check_model_task, context_of
    from fsdp_shard.planning.memory import PlannedRun, plan_memory
    from fsdp_shard.planning.report import figures, plan_report
    from fsdp_shard.training import origin_config, settle_run_length

    model, trusted = planned_model(config), config.model.trust_remote_code
    model_config = origin_config(config.model, model.source)
    check_model_task(model_config, config.model.task)
    context = context_of(model_config, trusted)
    length, num_ranks = settle_run_length(config.data, model.step, context), config.launch.num_ranks
    saving, memory_bytes = config.checkpoint.asynchronous, config.device.memory_bytes
    sections = (config.model, config.shard, config.train, config.optim, length, num_ranks, config.adapter)
    on_gpu, packs = uses_gpus(config.launch), config.data.packing
    run = PlannedRun(*sections, saving, config.objective, on_gpu=on_gpu, is_packed=packs)
    plan = plan_memory(model_config, run)
    dispatch_text, dispatched = _plan_dispatch(config, model, length)
    trace_text, traced = _trace(model_config, run, plan) if config.trace else ("", {})
    text = f"{context.describe(length)}\n{_objective_line(run)}{plan_report(plan, memory_bytes)}"
    text += f"{trace_text}{dispatch_text}"
    if model.step is not None:
        resumed = f"The run would resume from {model.step}; nothing was written into its directory."
        text += f"\n\n{resumed} {model.note or ''}"
    return RunPlan(model, text, figures(plan, memory_bytes) | traced | dispatched | {"sequence_length": length})


def _trace(config: PretrainedConfig, run: PlannedRun, plan: MemoryPlan) -> tuple[str, dict[str, Any]]:
    """Text and figures of the traced steps of rank 0."""
    from fsdp_shard.planning.report import trace_figures, trace_report
    from fsdp_shard.planning.step_trace import trace_step

    trace, planned = trace_step(config, run), plan.per_rank[0].peak_bytes
    return f"\n\n{trace_report(trace, planned)}", {"trace": trace_figures(trace, planned)}


def _objective_line(run: PlannedRun) -> str:
    """What an objective other than supervised fine-tuning adds, for people."""
    objective = run.objective
    if objective.name == "sft":
        return ""
    parts = ["a sample is two sequences"] if objective.samples == "pairs" else []
    if run.reference_kind is not None:
        parts.append(
            "a frozen reference alongside it" if run.has_sharded_reference else "no second model while it trains"
        )
    parts += ["the teacher is not counted"] if objective.name == "distill" else []
    return f"objective={objective.name}: {', '.join(parts) or 'one sequence a sample'}\n"


def _plan_dispatch(config: PlannedSettings, model: PlannedModel, length: int) -> tuple[str, dict[str, Any]]:
    """Text and figures of the device map of `generate`, if one is asked for."""
    if config.dispatch.device_map is None:
        return "", {}
    from fsdp_shard.inference import KVCacheBudget, plan_from_config
    from fsdp_shard.models import load_config

    budget = KVCacheBudget(config.train.micro_batch_size, length)
    model_config = load_config(model.source.directory, config.model.trust_remote_code)
    devices = plan_from_config(model_config, config.dispatch, budget)
    text = f"\n\n{devices.table()}\n{devices.describe()} of {budget}"
    return text, {"device_map": devices.devices, "dispatch": asdict(devices)}


def planned_model(config: PlannedSettings) -> PlannedModel:
    """Find the model of a run: that of `model.path`, or of the step that a run in `run_dir` would resume from.

    Without a step, torch is not loaded.

    Raises:
        ConfigError, CheckpointError: `run_dir` holds a run of another model, or one that cannot be resumed.
    """
    if Store(Path(config.run_dir) / CHECKPOINTS).latest() is None:
        return PlannedModel(config.source)
    from fsdp_shard.training import check_base_model, check_continues, find_step, model_source

    step = find_step("auto", config.run_dir)
    check_continues(config.adapter, step)
    note = check_base_model(config, step)
    return PlannedModel(model_source(config, step), step, note)
