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
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig, check_model_config
from fsdp_shard.planning.config import DeviceConfig, PlanDataConfig, PlanSavingConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, OptimConfig, TrainConfig
from fsdp_shard.utils import say

if TYPE_CHECKING:
    from fsdp_shard.inference import DispatchConfig
    from fsdp_shard.planning.measured.measured_run import MeasuredRun
    from fsdp_shard.planning.memory import MemoryPlan, PlannedRun


class PlannedSettings(Protocol):
    """The config of a plan, as far as planning uses it."""

    run_dir: str
    run: str | None
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
        memory: The memory of each rank.
        memory_bytes: The memory of a device, if known.
    """

    model: PlannedModel
    text: str
    figures: Mapping[str, Any]
    memory: MemoryPlan
    memory_bytes: int | None

    def draw(self, directory: str | Path) -> None:
        """Leave the pictures of the plan in `directory`: plan.html, and timeline.png if matplotlib is installed."""
        from fsdp_shard.planning.pictures.plan_page import PAGE, write_pictures

        problem = write_pictures(self.memory, self.memory_bytes, Path(directory), str(self.model.source))
        say(f"\nPictures: {Path(directory) / PAGE}. {problem or ''}".rstrip())


def check_plan(config: PlannedSettings) -> None:
    """Raise an InputError for what can be found wrong with a plan before torch is loaded.

    Example:
        >>> fs.check_plan(config)  # doctest: +SKIP
    """
    if config.run is not None and Path(config.run_dir).resolve() == Path(config.run).resolve():
        raise ConfigError(
            f"run_dir={config.run_dir} is the run that is compared, and nothing is written into it; give another "
            f"run_dir."
        )
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
    from fsdp_shard.planning.measured.comparison_with_run import compare, comparison_figures, comparison_text
    from fsdp_shard.planning.memory import PlannedRun, plan_memory
    from fsdp_shard.planning.report import figures, plan_report
    from fsdp_shard.training import origin_config, settle_run_length

    model, trusted = planned_model(config), config.model.trust_remote_code
    measured = None if config.run is None else _measured(config)
    model_config = origin_config(config.model, model.source)
    check_model_task(model_config, config.model.task)
    context = context_of(model_config, trusted)
    length, num_ranks = settle_run_length(config.data, model.step, context), config.launch.num_ranks
    saving, memory_bytes = config.checkpoint.asynchronous, config.device.memory_bytes
    sections = (config.model, config.shard, config.train, config.optim, length, num_ranks, config.adapter)
    on_gpu, packs = uses_gpus(config.launch), config.data.packing
    if measured is not None:
        num_ranks, on_gpu = measured.num_ranks or num_ranks, measured.device == "cuda" if measured.device else on_gpu
    run = PlannedRun(*sections, saving, config.objective, on_gpu=on_gpu, is_packed=packs)
    plan = plan_memory(model_config, run)
    dispatch_text, dispatched = _plan_dispatch(config, model, length)
    text = f"{context.describe(length)}\n{_objective_line(run)}{plan_report(plan, memory_bytes)}{dispatch_text}"
    if model.step is not None:
        resumed = f"The run would resume from {model.step}; nothing was written into its directory."
        text += f"\n\n{resumed} {model.note or ''}"
    found = figures(plan, memory_bytes) | dispatched | {"sequence_length": length}
    if measured is not None:
        rows = compare(plan, measured)
        text += f"\n\n{comparison_text(rows, plan, measured, found)}"
        found["measured"] = comparison_figures(rows, measured)
    return RunPlan(model, text, found, plan, memory_bytes)


def _measured(config: PlannedSettings) -> MeasuredRun:
    """What `run` has measured; its length of sequences becomes that of the plan."""
    from fsdp_shard.planning.measured.measured_run import read_measured

    measured = read_measured(Path(config.run or "").expanduser())
    if config.data.sequence_length is None:
        config.data.sequence_length = measured.sequence_length
    return measured


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
