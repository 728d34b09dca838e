"""The snapshots of a planned run: the recording of one micro-batch, simulated over the model's units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import sharding
from fsdp_shard.planning.plan_cache import PlanCache
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.device_overhead import CUBLAS_WORKSPACE_BYTES
from fsdp_shard.planning.step.load_snapshots import FIGURES_BYTES, loading_snapshots, row_index_bytes
from fsdp_shard.planning.step.micro_batch import batch_bytes
from fsdp_shard.planning.step.recorded_run import RecordedRun
from fsdp_shard.planning.step.recording.events import DONE, LOSS, Event, Recordings
from fsdp_shard.planning.step.recording.fake_attention import layer_mask_bytes
from fsdp_shard.planning.step.recording.record_passes import CANNOT_TRAIN, what_failed
from fsdp_shard.planning.step.shard_state import RankPart
from fsdp_shard.planning.step.simulators.registry import SIMULATORS
from fsdp_shard.planning.step.simulators.step_simulator import StepRules, StepSimulator
from fsdp_shard.planning.step.snapshot import (
    ACTIVATIONS,
    BUFFERS,
    EVA,
    GATHERED,
    GRADIENTS,
    LOSS_TERM,
    TEACHER,
    UNREDUCED,
    Snapshot,
    highest_of_phases,
)
from fsdp_shard.planning.step.teacher_pass import PlannedTeacher, teacher_of
from fsdp_shard.planning.step.unit_bytes import trained_dtype, unit_bytes
from fsdp_shard.training import cross_entropy_chunk_bytes


@dataclass(frozen=True)
class SimulatedStep:
    """The snapshots of a run on any rank, without the optimizer state.

    Attributes:
        snapshots: The snapshots.
        offloaded_bytes: Maximum bytes of activations in host memory.
        problem: Why activations could not be measured, if so; there are no snapshots of a step in this case.
        uncounted: Why a phase outside the step could not be measured, by phase.
        directions: Bytes of the directions found so far by `adapter.init=eva` on each rank, while it runs.
        teacher: The memory of a teacher that runs alongside on each rank, if there is one.
    """

    snapshots: tuple[Snapshot, ...]
    offloaded_bytes: int = 0
    problem: str | None = None
    uncounted: Mapping[str, str] = field(default_factory=dict)
    directions: Sequence[int] = ()
    teacher: PlannedTeacher | None = None

    @cached_property
    def highest_snapshots(self) -> tuple[Snapshot, ...]:
        """The highest snapshot of each phase."""
        return tuple(highest_of_phases(self.snapshots).values())

    @cached_property
    def unsharded_bytes(self) -> int:
        """The maximum unsharded bytes, including buffers."""
        return self._most(GATHERED, UNREDUCED, BUFFERS)

    @cached_property
    def activations_bytes(self) -> int | None:
        """The maximum bytes of activations and the loss; None if they could not be measured."""
        return None if self.problem else self._most(ACTIVATIONS, LOSS_TERM)

    def _most(self, *terms: str) -> int:
        return max((sum(each.terms.get(term, 0) for term in terms) for each in self.snapshots), default=0)


def plan_step(config: PretrainedConfig, part: RankPart, run: PlannedRun, cache: PlanCache) -> SimulatedStep:
    """Simulate a step of a run."""
    in_units, parameters = unit_bytes(part.model, part.units, run.shard, run.num_shards, part.experts)
    terms = _sharded_terms(run, parameters)
    before = loading_snapshots(config, part, run, in_units, terms)
    recorded = RecordedRun.of(config, part, run)
    model, has_loss_head = recorded.build(config, cache)
    try:
        recordings = recorded.record(model, has_loss_head, cache)
    except CANNOT_TRAIN as error:
        return SimulatedStep((*before,), problem=what_failed(error))
    if run.on_gpu and run.objective.is_cross_entropy and not has_loss_head:
        recordings = _with_chunks_of_gpus(recordings, part.model, run)
    terms |= _constant_terms(config, part.model, run, recorded)
    begin, rules = SIMULATORS[run.shard.wrapper], _rules(part.model, run)
    directions: list[int] = []
    if recorded.eva is not None and EVA in recordings.extra:
        before += _find_directions(begin(in_units, rules, {**terms}), recordings)
        directions = recorded.eva.state_bytes(recordings.extra[EVA][0], dict(part.model.named_parameters()))
    uncounted, teacher = dict(recordings.uncounted), teacher_of(run, cache)
    if teacher is not None:
        terms[TEACHER], rules = teacher.held_bytes, replace(rules, teacher_pass_bytes=teacher.pass_bytes)
        uncounted |= {} if teacher.problem is None else {TEACHER: teacher.problem}
    simulator = begin(in_units, rules, terms)
    if type(run.shard.reshard_after_forward) is int:
        simulator.evaluate(recordings)  # as before the first step; some gathered units stay
        simulator.snapshots.clear()
    simulator.step(recordings)
    simulator.update()
    simulator.evaluate(recordings)
    snapshots = (*before, *simulator.snapshots)
    return SimulatedStep(snapshots, simulator.most_offloaded, None, uncounted, directions, teacher)


def _sharded_terms(run: PlannedRun, parameters: int) -> dict[str, int]:
    """Bytes by term of the loaded model and of its reference, each with shards of `parameters` bytes."""
    if run.shard.cpu_offload:
        return {}
    return {"parameters": parameters} | ({"reference": parameters} if run.has_sharded_reference else {})


def _constant_terms(
    config: PretrainedConfig, model: PreTrainedModel, run: PlannedRun, recorded: RecordedRun
) -> dict[str, int]:
    """Bytes by term that a device holds besides from the first step on."""
    terms = {"cuBLAS workspace": CUBLAS_WORKSPACE_BYTES} if run.on_gpu else {}
    terms["batch"] = 2 * batch_bytes(model, recorded.size) * run.num_micro_batches  # also those of the next step
    terms["buffers"] = sum(buffer.nbytes for buffer in model.buffers()) + FIGURES_BYTES
    if recorded.size.shares_prompts:  # a model keeps them from its first batch on
        num_models = 2 if run.has_sharded_reference else 1
        terms["layer masks"] = num_models * layer_mask_bytes(model, run.padded_length)
    if recorded.keeps_scores:  # one more copy in the backward pass, as measured on an H200
        terms["attention scores"] = _score_bytes(config, run)
    if not run.shard.is_sharded:
        terms[GRADIENTS] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if run.on_gpu:  # as measured on an H200 with torch 2.11; on CPUs they are freed
            terms["buckets of the first step"] = terms[GRADIENTS]
    return terms


def _score_bytes(config: PretrainedConfig, run: PlannedRun) -> int:
    """Bytes of the float32 scores of all token pairs in one layer."""
    text: Any = config.get_text_config()
    return 4 * run.num_rows * int(text.num_attention_heads) * max(run.padded_length, run.decoder_length) ** 2


def _with_chunks_of_gpus(recordings: Recordings, model: PreTrainedModel, run: PlannedRun) -> Recordings:
    """The recordings, made on a CPU, adjusted to the larger chunks in which a GPU upcasts logits.

    In training four copies of a chunk exist: upcast, its log-softmax, and the gradients of both; otherwise two.
    """
    text: Any = model.config.get_text_config()
    logits = 4 * run.num_rows * run.decoder_length * int(getattr(text, "vocab_size", 1))
    cpu, gpu = (min(logits, cross_entropy_chunk_bytes(device, logits)) for device in ("cpu", "cuda"))
    more = gpu - cpu
    return replace(
        recordings,
        training=_raised(recordings.training, LOSS, 4 * more),
        evaluation=_raised(recordings.evaluation, DONE, 2 * more),
    )


def _raised(recording: Sequence[Event], kind: str, num_bytes: int) -> list[Event]:
    """The recording with additional temporary bytes before the events of one kind."""
    return [
        replace(event, rise=event.rise + num_bytes, rise_alone=event.rise_alone + num_bytes)
        if event.kind == kind
        else event
        for event in recording
    ]


def _rules(model: PreTrainedModel, run: PlannedRun) -> StepRules:
    shard, stored = run.shard, str(trained_dtype(model)).removeprefix("torch.")
    default_backward = 1 if shard.wrapper == "fsdp1" else 0
    backward = default_backward if shard.prefetch_backward is None else shard.prefetch_backward
    has_nothing_to_sync = shard.wrapper == "fsdp1" and run.num_ranks == 1 and not shard.cpu_offload
    return StepRules(
        reshard=shard.reshard_after_forward,
        prefetch_forward=shard.prefetch_forward or 0,
        prefetch_backward=backward,
        num_micro_batches=run.num_micro_batches,
        sync_every_micro_batch=shard.sync_every_micro_batch or has_nothing_to_sync,
        gradient_itemsize=sharding.itemsize(shard.param_dtype),
        casts_gradients=shard.param_dtype != shard.reduce_dtype,
        casts_reduced=shard.reduce_dtype != stored,
        keeps_reduced=shard.replicas > 1,
        copies_reduced=not run.on_gpu,
        offloads_activations=shard.activation_offload,
        has_host_gradients=shard.cpu_offload,
        save_bytes=row_index_bytes(model, run),
    )


def _find_directions(simulator: StepSimulator, recordings: Recordings) -> list[Snapshot]:
    """The snapshots of computing an adapter's initial values."""
    simulator.terms.pop("reference", None)  # the reference is opened later
    simulator.run_without_gradients(EVA, recordings.extra[EVA])
    return simulator.snapshots
