"""The plan of a run from its settings: its model, the memory of each rank, and with a device map that of `generate`.

The checks need no torch, so that a mistake shows at once; `plan_run` loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint import CHECKPOINTS, Location, Store
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.errors import ConfigError, RunError
from fsdp_shard.models import ModelConfig, check_model_config
from fsdp_shard.planning.config import PlanDataConfig, PlannedLaunchConfig, PlanSavingConfig
from fsdp_shard.planning.devices import DeviceConfig, Hardware, check_device, hardware_of
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, OptimConfig, TrainConfig
from fsdp_shard.utils import format_size, only_errors_of, require_package, say, walk

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.inference import DispatchConfig
    from fsdp_shard.planning.measured.measured_run import MeasuredRun
    from fsdp_shard.planning.memory import MemoryPlan, PlannedRun
    from fsdp_shard.planning.search.pareto_front import Front
    from fsdp_shard.planning.search.planner import Planner


class SectionSettings(Protocol):
    """The sections of a run that change its memory, and what the command line has of them."""

    given: frozenset[str]
    model: ModelConfig
    shard: ShardConfig
    objective: ObjectiveConfig
    adapter: AdapterConfig
    optim: OptimConfig
    train: TrainConfig

    @property
    def launch(self) -> LaunchConfig:
        """The ranks."""


class PlannedSettings(Protocol):
    """The config of a plan, as far as planning uses it."""

    run_dir: str
    given: frozenset[str]
    run: str | None
    search: bool
    launch: PlannedLaunchConfig
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
    def kept_run_dir(self) -> str | None:
        """Where files are left, if any are."""

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
        misfit: Why it does not fit in `device.memory`, in a sentence; None if it does, or if that is not known.
        front: What a search found.
        memory: The memory of each rank.
        memory_bytes: The memory of a device, if known.
    """

    model: PlannedModel
    text: str
    figures: Mapping[str, Any]
    misfit: str | None = None
    front: Front | None = None
    memory: MemoryPlan | None = None
    memory_bytes: int | None = None

    def draw(self, directory: str | Path) -> None:
        """Leave plan.html, and timeline.png if matplotlib is installed, in `directory`; of a search, search.png."""
        if self.front is not None and self.front.points:
            from fsdp_shard.planning.search.front_plot import PICTURE, plot_front

            plot_front(self.front, Path(directory) / PICTURE)
        if self.memory is not None:
            from fsdp_shard.planning.pictures.plan_page import PAGE, write_pictures

            problem = write_pictures(self.memory, self.memory_bytes, Path(directory), str(self.model.source))
            say(f"\nPictures: {Path(directory) / PAGE}. {problem or ''}".rstrip())

    def require_fit(self) -> None:
        """Raise RunError if the run does not fit in `device.memory`."""
        if self.misfit is not None:
            raise RunError(self.misfit)


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
    if config.search and config.kept_run_dir is not None:
        require_package("matplotlib", "plots", "search=true with run_dir", "leave run_dir out")
    source = planned_model(config).source
    check_model_config(source.directory)
    source.check_dequantizable()


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
    from fsdp_shard.models import check_model_task, context_of
    from fsdp_shard.planning.measured.comparison_with_run import compare, comparison_figures, comparison_text
    from fsdp_shard.planning.memory import PlannedRun
    from fsdp_shard.training import origin_config, settle_run_length

    model, trusted = planned_model(config), config.model.trust_remote_code
    measured = None if config.run is None else _measured(config)
    with only_errors_of("transformers"):  # kernels that are missing on this machine say nothing of the planned one
        model_config = origin_config(config.model, model.source)
        context = context_of(model_config, trusted)
    check_model_task(model_config, config.model.task)
    length, num_ranks = settle_run_length(config.data, model.step, context), config.launch.num_ranks
    on_gpu, packs = _plans_gpus(config), config.data.packing
    if measured is not None:
        num_ranks, on_gpu = measured.num_ranks or num_ranks, measured.device == "cuda" if measured.device else on_gpu
    sections = (config.model, config.shard, config.train, config.optim, length, num_ranks, config.adapter)
    run = PlannedRun(*sections, config.checkpoint.asynchronous, config.objective, on_gpu=on_gpu, is_packed=packs)
    plan = _plan_search if config.search else _plan_one
    with only_errors_of("transformers"):
        found = plan(config, model, model_config, run)
    text = f"{context.describe(length)}\n{_quantization_line(model)}{_objective_line(run)}{found.text}"
    if model.step is not None:
        resumed = f"The run would resume from {model.step}; nothing was written into its directory."
        text += f"\n\n{resumed} {model.note or ''}"
    figures = {**found.figures, "sequence_length": length}
    if measured is not None:
        assert found.memory is not None, "a search of a run is refused"
        rows = compare(found.memory, measured)
        text += f"\n\n{comparison_text(rows, found.memory, measured, figures)}"
        figures["measured"] = comparison_figures(rows, measured)
    return replace(found, text=text, figures=figures)


def _plans_gpus(config: PlannedSettings) -> bool:
    """Whether the planned ranks have GPUs: those of this machine, or of a preset."""
    from fsdp_shard.distributed import uses_gpus

    return uses_gpus(config.launch) or (config.launch.device == "auto" and config.device.is_gpu)


def _plan_one(config: PlannedSettings, model: PlannedModel, model_config: PretrainedConfig, run: PlannedRun) -> RunPlan:
    """The plan of a run as it is, and where it does not fit, settings that would."""
    from fsdp_shard.planning.costs.step_report import step_figures, step_report
    from fsdp_shard.planning.costs.step_time import missing_figures
    from fsdp_shard.planning.report import figures, plan_report
    from fsdp_shard.planning.search.advice import advise
    from fsdp_shard.planning.search.advice_report import advice_figures, advice_lines

    hardware = _hardware(config)
    planner, memory_bytes = _planner(config, model_config, run, hardware), hardware.memory_bytes
    plan, cost = planner.plan(run), planner.cost(run)
    check_device(config.device, hardware, missing_figures(cost, hardware))
    lines, found, misfit = [plan_report(plan, memory_bytes)], None, None
    if plan.fits(memory_bytes) is False:
        assert memory_bytes is not None, "else it is not known"
        nodes, starts = config.launch.min_nodes, model.step is None
        found = advise(planner, run, memory_bytes, chosen_settings(config), num_nodes=nodes, trains_other=starts)
        lines += advice_lines(found)
        misfit = (
            f"The run needs {format_size(plan.needed_bytes)} on a rank, more than the {format_size(memory_bytes)} of "
            f"device.memory; {'the plan shows settings that fit' if found else 'no settings were found that fit'}."
        )
    dispatch_text, dispatched = _plan_dispatch(config, model, run.sequence_length)
    trace_text, traced = _trace(model_config, run, plan) if config.trace else ("", {})
    lines += ["", step_report(cost, hardware)]
    all_figures = {
        **figures(plan, memory_bytes),
        "advice": advice_figures(found or ()),
        "step": step_figures(cost, hardware),
        **traced,
        **dispatched,
    }
    text = "\n".join(lines) + trace_text + dispatch_text
    return RunPlan(model, text, all_figures, misfit, memory=plan, memory_bytes=memory_bytes)


def _hardware(config: PlannedSettings) -> Hardware:
    return hardware_of(config.device, ranks_per_node=config.launch.ranks if config.launch.max_nodes > 1 else None)


def _plan_search(
    config: PlannedSettings, model: PlannedModel, model_config: PretrainedConfig, run: PlannedRun
) -> RunPlan:
    """The fewest ranks that fit, and settings for them."""
    from fsdp_shard.planning.search.pareto_front import front_figures, front_text, search_front

    launch, hardware = config.launch, _hardware(config)
    if hardware.memory_bytes is None:
        raise ConfigError(
            "search=true needs the memory of the devices; set device.memory, such as device.memory=80GiB, or a preset "
            "such as device=h100."
        )
    planner = _planner(config, model_config, run, hardware)
    given = chosen_settings(config)
    front = search_front(planner, run, hardware.memory_bytes, launch.rank_counts, given, launch.min_nodes)
    misfit = None
    if front.cheapest is None:
        misfit = (
            f"Nothing fits in {format_size(hardware.memory_bytes)} with launch.ranks={launch.ranks}; give more ranks, "
            f"or GPUs with more memory."
        )
    return RunPlan(model, front_text(front), front_figures(front), misfit, front)


def _planner(config: PlannedSettings, model_config: PretrainedConfig, run: PlannedRun, hardware: Hardware) -> Planner:
    """What plans `run` and others of its model; it knows the time of a step where the hardware is known."""
    from fsdp_shard.planning.costs.step_time import step_time
    from fsdp_shard.planning.search.planner import Planner

    planner = Planner(model_config, on_gpu=config.launch.device != "cpu")

    def seconds(candidate: PlannedRun, plan: MemoryPlan) -> float:
        found = step_time(planner.cost(candidate), hardware)
        assert found is not None, "as with the run itself"
        return found.seconds

    if hardware.is_whole and step_time(planner.cost(run), hardware) is not None:
        planner.seconds = seconds
    return planner


def chosen_settings(config: SectionSettings) -> set[str]:
    """Names of the settings and groups that the user chose: on the command line, or unlike the defaults."""
    names = set(config.given)
    if config.launch.num_ranks > 1:
        names.add("launch.ranks")
    usual = {"shard": "Fsdp2Config", "objective": "ObjectiveConfig", "adapter": "AdapterConfig", "optim": "AdamWConfig"}
    for section in ("model", "train", *usual):
        value = getattr(config, section)
        if type(value).__name__ != usual.get(section, type(value).__name__):
            names.add(section)
        defaults = {name: default for name, _, default in walk(type(value)(), f"{section}.")}
        names.update(name for name, _, now in walk(value, f"{section}.") if now != defaults[name])
    return names


def _quantization_line(model: PlannedModel) -> str:
    """Which model is planned, for people, where the one that is given is stored quantized."""
    method = model.source.check_dequantizable()
    if method is None:
        return ""
    return f"The weights are quantized ({method}); this is the plan of what convert dequantize=true makes of them.\n"


def _measured(config: PlannedSettings) -> MeasuredRun:
    """What `run` has measured; its length of sequences becomes that of the plan."""
    from fsdp_shard.planning.measured.measured_run import read_measured

    measured = read_measured(Path(config.run or "").expanduser())
    if config.data.sequence_length is None:
        config.data.sequence_length = measured.sequence_length
    return measured


def _trace(config: PretrainedConfig, run: PlannedRun, plan: MemoryPlan) -> tuple[str, dict[str, Any]]:
    """Text and figures of the traced steps of rank 0."""
    from fsdp_shard.planning.trace.step_trace import trace_step
    from fsdp_shard.planning.trace.trace_report import trace_figures, trace_report

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
