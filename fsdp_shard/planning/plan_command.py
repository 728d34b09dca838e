"""Plans a run from its settings: its model, the memory of each rank, and with a device map the plan of `generate`.

The checks need no torch, so mistakes are reported at once; `plan_run` loads torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint import CHECKPOINTS, StepStore
from fsdp_shard.data import LABELED, PAIRS
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import check_model_config
from fsdp_shard.planning.plan_result import PlannedModel, PlannedSettings, PlanResult
from fsdp_shard.planning.search.searched_plan import plan_search
from fsdp_shard.planning.single_plan import plan_one
from fsdp_shard.planning.unplanned import setting_at, unplanned_settings
from fsdp_shard.utils import check, only_errors_of, require_package

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.planning.measured.measured_run import MeasuredRun
    from fsdp_shard.planning.planned_run import PlannedRun


def check_plan(config: PlannedSettings) -> None:
    """Raise an InputError for mistakes that can be found before torch is loaded.

    Example:
        >>> fs.check_plan(config)  # doctest: +SKIP
    """
    _check_settings(config)
    source = planned_model(config).source
    check_model_config(source.config_directory)
    source.check_dequantizable()


def _check_settings(config: PlannedSettings) -> None:
    """Check what needs no model: settings and packages."""
    check(config)
    if config.run is not None and Path(config.run_dir).resolve() == Path(config.run).resolve():
        raise ConfigError(
            f"run_dir={config.run_dir} is the run that is compared, and nothing is written into it; give another "
            f"run_dir."
        )
    config.adapter.check_installed()
    config.optim.check_installed()
    if config.search and config.kept_run_dir is not None:
        require_package("matplotlib", "plots", "search=true with run_dir", "remove run_dir")


def plan_run(config: PlannedSettings) -> PlanResult:
    """Plan the memory of each rank of `finetune`, and with `dispatch.device_map` the block placement of `generate`.

    Args:
        config: The settings of `plan`; an open `data.sequence_length` is filled in. Only the model's config is read.

    Returns:
        The plan.

    Raises:
        ModelError, ConfigError: A setting is wrong, the model cannot be built, or the settings do not suit it.

    Example:
        >>> plan = fs.plan_run(config)  # doctest: +SKIP
        >>> plan.figures["peak_bytes"]  # doctest: +SKIP
        8437268480
    """
    from fsdp_shard.models import context_length_of
    from fsdp_shard.planning.measured.comparison_with_run import compare_with_run, comparison_figures, comparison_text
    from fsdp_shard.planning.measured.measured_run import read_measured
    from fsdp_shard.training import origin_config, settle_run_length

    _check_settings(config)
    model, trusted = planned_model(config), config.model.trust_remote_code
    measured = None
    if config.run is not None:
        measured = read_measured(Path(config.run).expanduser())
        if config.data.sequence_length is None:
            config.data.sequence_length = measured.sequence_length
    with only_errors_of("transformers"):  # kernels missing on this machine may exist on the planned one
        model_config = origin_config(config.model, model.source)
        context_length = context_length_of(model_config, trusted)
    _check_task(config, model_config)
    length = settle_run_length(config.data, model.resumed_from, context_length)
    run = _planned_run(config, length, measured, resumes=model.resumed_from is not None)
    plan = plan_search if config.search else plan_one
    with only_errors_of("transformers"):
        notes = _notes(config, run, is_adapter_read=_reads_adapter(model_config, run))
        found = plan(config, model, model_config, run)
    lengths = context_length.describe(length)
    if run.target_length is not None:
        lengths += f"\n{context_length.describe(run.target_length, 'data.target_length')}"
    text = f"{lengths}\n{_quantization_line(model)}{notes}{found.text}"
    if model.resumed_from is not None:
        resumed = f"The run would resume from {model.resumed_from}; nothing was written into its directory."
        text += f"\n\n{resumed} {model.note or ''}"
    figures = {**found.figures, "sequence_length": length}
    if measured is not None:
        assert found.memory is not None, "a search of a run is refused"
        rows = compare_with_run(found.memory, measured, run.num_replicas)
        # A bound on the time of other devices says nothing of this run's.
        is_of_others = measured.device is None or (config.device.planned_kind == "gpu" and not run.on_gpu)
        known = {name: value for name, value in figures.items() if name != "step" or not is_of_others}
        text += f"\n\n{comparison_text(rows, found.memory, measured, known)}"
        figures["measured"] = comparison_figures(rows, measured)
    return replace(found, text=text, figures=figures)


def _check_task(config: PlannedSettings, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if the model, the objective or the data do not suit the task."""
    from fsdp_shard.data import check_packed, check_settings_of_task
    from fsdp_shard.models import check_model_task
    from fsdp_shard.training import check_task

    check_model_task(model_config, config.model.task)
    check_task(config.objective, config.model.task)
    check_settings_of_task(config.model.task, vars(config.data))
    if config.data.packing:
        check_packed(config.model.task, config.objective.samples)


def _planned_run(config: PlannedSettings, length: int, measured: MeasuredRun | None, *, resumes: bool) -> PlannedRun:
    """The run that the settings describe; a measured one, on the ranks and the device that it had."""
    from fsdp_shard.planning.planned_run import PlannedRun

    num_ranks = config.launch.num_ranks
    on_gpu = _plans_gpus(config)
    if measured is not None:
        num_ranks = measured.num_ranks or num_ranks
        on_gpu = measured.device == "cuda" if measured.device else on_gpu
        resumes = measured.resumes
    return PlannedRun.of(config, length, num_ranks, on_gpu=on_gpu, resumes=resumes)


def _plans_gpus(config: PlannedSettings) -> bool:
    """Whether the planned ranks have GPUs: those of this machine, or those that `device` specifies."""
    from fsdp_shard.distributed import uses_gpus

    kind = config.device.planned_kind if config.launch.device == "auto" else None
    return uses_gpus(config.launch) if kind is None else kind == "gpu"


def _quantization_line(model: PlannedModel) -> str:
    """A line to print that names the planned model, if the given one is stored quantized."""
    method = model.source.check_dequantizable()
    if method is None:
        return ""
    return f"The weights are quantized ({method}); this is the plan of what convert dequantize=true makes of them.\n"


def _reads_adapter(model_config: PretrainedConfig, run: PlannedRun) -> bool:
    """Whether the adapter of `adapter.path` is on this machine; ConfigError if other settings define another one."""
    from fsdp_shard.planning.meta_model import build_planned
    from fsdp_shard.training import LoraConfig, check_planned

    if not isinstance(run.adapter, LoraConfig) or run.adapter.path is None:
        return False
    built, adapter = build_planned(model_config, run.model, run.adapter, run.model.dtype)
    assert adapter is not None
    return check_planned(adapter, run.adapter, {name: tuple(param.shape) for name, param in built.named_parameters()})


def _notes(config: PlannedSettings, run: PlannedRun, *, is_adapter_read: bool) -> str:
    """Lines about the objective, a missing adapter, prompts of unknown length, and settings that are not planned."""
    path = getattr(run.adapter, "path", None)
    of_adapter = ""
    if path is not None and not is_adapter_read:
        of_adapter = f"adapter.path={path} is not on this machine: the adapter is that of the other settings\n"
    of_prompts = ""
    if run.train.sample_prompts:
        of_prompts = "train.sample_prompts are taken to have a token for each byte, and data.kind to add none\n"
    of_settings = ""
    if config.run is None and (settings := unplanned_settings(partial(setting_at, config))):  # a comparison lists them
        of_settings = f"Not planned: {'; '.join(settings)}\n"
    return _objective_line(run) + of_adapter + of_prompts + of_settings


def _objective_line(run: PlannedRun) -> str:
    """A line about the additional memory of an objective other than supervised fine-tuning."""
    objective = run.objective
    if objective.name == "sft":
        return ""
    sample = "a sample is one sequence of pairs that share prompts" if run.is_packed else "a sample is two sequences"
    parts = [sample] if objective.samples == PAIRS else []
    parts += ["a sample is two sequences, one of them without gradients"] if objective.samples == LABELED else []
    if run.reference_kind is not None:
        parts.append(
            "a frozen reference alongside it" if run.has_sharded_reference else "no second model while it trains"
        )
    return f"objective={objective.name}: {', '.join(parts) or 'one sequence a sample'}\n"


def planned_model(config: PlannedSettings) -> PlannedModel:
    """Find the model of a run: `model.path`, or the model of the step that a run in `run_dir` would resume from.

    Loads torch only if there is a step.

    Raises:
        ConfigError, CheckpointError: `run_dir` holds a run of another model, or a run that cannot be resumed.
    """
    if StepStore(Path(config.run_dir) / CHECKPOINTS).latest() is None:
        return PlannedModel(config.source)
    from fsdp_shard.training import check_base_model, check_continues, find_step, model_source

    step = find_step("auto", config.run_dir)
    check_continues(config.adapter, step)
    note = check_base_model(config, step)
    return PlannedModel(model_source(config, step), step, note)
