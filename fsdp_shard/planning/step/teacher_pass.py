"""The memory of a teacher that runs alongside the planned run on each rank: permanently, and during its pass.

The teacher is dispatched (`inference`), not sharded, so each rank holds all of it. Only its config is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from fsdp_shard.errors import ConfigError, InputError
from fsdp_shard.inference import (
    DispatchConfig,
    check_gpu_budgets,
    model_from_config,
    parse_budgets,
    plan_dispatch,
)
from fsdp_shard.models import load_config
from fsdp_shard.planning.plan_cache import PlanCache
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.micro_batch import num_recorded_predictions
from fsdp_shard.planning.step.recording.events import DONE, Event
from fsdp_shard.planning.step.recording.record_passes import CANNOT_RUN, record_forward, what_failed
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.training import DeviceBatch, DistillConfig, TopTokens, dispatched_rows, split_targets, use_loss_head

_ALL = 1 << 60  # bytes: more than any model has


@dataclass(frozen=True)
class PlannedTeacher:
    """The memory of a teacher on each rank.

    Attributes:
        held_bytes: Bytes on the rank's device at all times: weights, on CPUs including memory-mapped ones, and the
            buffers of streamed blocks.
        pass_bytes: Maximum temporary bytes there of its pass over a micro-batch.
        host_bytes: Its bytes in host memory, for a rank with a GPU.
        problem: Why its pass could not be measured, if so.
        is_on_device: Whether it computes on the rank's device, rather than on the CPU of a GPU rank.
        weights_bytes: Bytes of its weights, wherever they are.
        streamed_bytes: The part of its weights that is copied to the device in each pass.
    """

    held_bytes: int
    pass_bytes: int
    host_bytes: int = 0
    problem: str | None = None
    is_on_device: bool = True
    weights_bytes: int = 0
    streamed_bytes: int = 0


def teacher_of(run: PlannedRun, cache: PlanCache) -> PlannedTeacher | None:
    """Return the teacher that runs alongside a run, if any, planned once for all runs that differ in other settings.

    Args:
        run: The settings of the run.
        cache: Values that plans of the model share.

    Raises:
        ConfigError, ModelError, PlanError: The teacher is missing, cannot be built, or does not fit in its budgets.
    """
    distill = run.objective
    if not isinstance(distill, DistillConfig) or distill.is_precomputed:
        return None
    settings = (distill, run.num_read_rows, run.sequence_length, run.is_packed, run.on_gpu, run.model.trust_remote_code)
    return cache.get("teacher", settings, lambda: _plan_teacher(distill, run))


def _plan_teacher(distill: DistillConfig, run: PlannedRun) -> PlannedTeacher:
    source, trust = distill.locate(fetch_weights=False), run.model.trust_remote_code
    settings = DispatchConfig(max_memory=_budgets(distill, run), trust_remote_code=trust)
    try:
        config = load_config(source.config_directory, trust)
        model = model_from_config(config, settings)
        devices = plan_dispatch(model, settings)[1]
    except InputError as error:
        raise type(error)(f"objective.teacher={distill.teacher}: {error}") from error
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    use_loss_head(model, "auto", any_vocabulary=True)
    try:
        taken, problem = _pass_bytes(model, run, distill.num_top_tokens(config)), None
    except CANNOT_RUN as error:
        taken, problem = 0, what_failed(error)
    held = devices.resident_bytes.get(devices.execution_device, 0) + devices.buffer_bytes + buffers
    weights = sum(devices.resident_bytes.values())
    if run.on_gpu and devices.execution_device == "cpu":  # the teacher computes there
        return PlannedTeacher(0, 0, held + taken, problem, is_on_device=False, weights_bytes=weights)
    on_host = devices.resident_bytes.get("cpu", 0) + devices.staging_bytes if run.on_gpu else 0
    streamed = weights - devices.resident_bytes.get(devices.execution_device, 0) if run.on_gpu else 0
    return PlannedTeacher(held, taken, on_host, problem, weights_bytes=weights, streamed_bytes=streamed)


def _budgets(distill: DistillConfig, run: PlannedRun) -> dict[Any, str]:
    """The memory budgets of each rank's teacher: without any, unlimited memory on the rank's device."""
    given = parse_budgets(distill.teacher_max_memory, "objective.teacher_max_memory")
    if given is None:
        return {0 if run.on_gpu else "cpu": str(_ALL)}
    gpus = [size for device, size in given.items() if device != "cpu"]
    if not run.on_gpu and "cpu" not in given:
        raise ConfigError(
            f"objective.teacher_max_memory={distill.teacher_max_memory} has no size for the CPU, and the planned ranks "
            f"have no GPU; add it, or plan for GPUs by device=h100 or launch.device=cuda."
        )
    found: dict[Any, str] = {"cpu": str(given["cpu"])} if "cpu" in given else {}
    return found | ({0: str(max(gpus))} if run.on_gpu and gpus else {})  # each rank uses a GPU of its own


def check_budgets(distill: DistillConfig, num_local_ranks: int) -> None:
    """Raise ConfigError for teacher budgets that `finetune` rejects: those that name only some of a machine's GPUs."""
    setting = "objective.teacher_max_memory"
    check_gpu_budgets(parse_budgets(distill.teacher_max_memory, setting) or {}, range(num_local_ranks), setting)


def _pass_bytes(model: PreTrainedModel, run: PlannedRun, top_k: int) -> int:
    """Maximum bytes of a pass over whole sequences of a micro-batch, including the teacher's outputs."""
    shape, chosen = (run.num_read_rows, run.sequence_length), num_recorded_predictions(model)

    def take(recorder: Recorder) -> None:
        ids, every = torch.zeros(shape, dtype=torch.long), torch.zeros(shape[0] * shape[1], dtype=torch.long)
        inputs = {"input_ids": ids} | ({"position_ids": torch.zeros_like(ids)} if run.is_packed else {})
        batch = DeviceBatch(inputs, torch.zeros_like(ids), every[:chosen])
        recorder.ignore([every, *batch.tensors()])
        split_targets(dispatched_rows(model, batch, TopTokens(top_k))[every])
        recorder.mark(DONE, "")

    recording, _ = record_forward(model, take, has_mask=run.is_packed)
    return _highest(recording)


def _highest(recording: Sequence[Event]) -> int:
    live = most = 0
    for event in recording:
        most = max(most, live + event.rise)
        live += event.change
    return most
