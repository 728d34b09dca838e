"""The snapshots of a planned run: the recording of one micro-batch, simulated over the model's units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import sharding
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.plan_cache import PlanCache, without_dtype, without_loss, without_ranks
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.completions import Completions
from fsdp_shard.planning.step.device_overhead import CUBLAS_WORKSPACE_BYTES
from fsdp_shard.planning.step.divided_model import divide_model
from fsdp_shard.planning.step.load_snapshots import FIGURES_BYTES, loading_snapshots, row_index_bytes
from fsdp_shard.planning.step.micro_batch import BatchSize, batch_bytes, planned_batch
from fsdp_shard.planning.step.recording.events import DONE, LOSS, Event, Recordings
from fsdp_shard.planning.step.recording.fake_attention import layer_mask_bytes
from fsdp_shard.planning.step.recording.record_passes import CANNOT_RUN, ExtraPasses, record_passes, what_failed
from fsdp_shard.planning.step.shard_state import RankPart
from fsdp_shard.planning.step.simulators.registry import SIMULATORS
from fsdp_shard.planning.step.simulators.step_simulator import StepRules, StepSimulator
from fsdp_shard.planning.step.snapshot import (
    ACTIVATIONS,
    BUFFERS,
    COMPLETIONS,
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
from fsdp_shard.training import DistillConfig, cross_entropy_chunk_bytes, use_loss_head

if TYPE_CHECKING:
    from fsdp_shard.planning.step.eva_pass import EvaPass


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
    model = part.model
    in_units, parameters = unit_bytes(model, part.units, run.shard, run.num_shards, part.experts)
    terms = {} if run.shard.cpu_offload else {"parameters": parameters}
    if run.has_sharded_reference and not run.shard.cpu_offload:
        terms["reference"] = parameters
    before = loading_snapshots(config, part, run, in_units, terms)
    of_batch = (run.objective, run.reference_kind, run.num_read_rows, run.padded_length, run.rows, run.target_length)
    of_ranks = (run.shard.context_parallel, run.shard.context_method)
    extra, eva = _extra_passes(config, run)
    dtypes = [(unit.fqn, unit.dtype) for unit in part.units]
    others = (run.adapter, without_ranks(run.shard), *of_batch, run.mask_fraction, *of_ranks, run.on_gpu, extra, dtypes)
    of_model = without_dtype(run.model)
    record, has_loss_head = cache.get("record", (of_model, *others), lambda: _record(config, run, part, extra))
    of_recording = (without_loss(of_model), has_loss_head, *others)
    try:
        with _math_attention() if _keeps_scores(config, run) else nullcontext():
            recordings = cache.get("recording", of_recording, record)
    except CANNOT_RUN as error:
        return SimulatedStep((*before,), problem=what_failed(error))
    if run.on_gpu:
        terms["cuBLAS workspace"] = CUBLAS_WORKSPACE_BYTES
        if run.objective.is_cross_entropy and not has_loss_head:
            recordings = _with_chunks_of_gpus(recordings, model, run)
    terms["batch"] = (
        2 * batch_bytes(model, _batch_size(config, run)) * run.num_micro_batches
    )  # also those of the next step
    terms["buffers"] = sum(buffer.nbytes for buffer in model.buffers()) + FIGURES_BYTES
    if _batch_size(config, run).shares_prompts:  # a model keeps them from its first batch on
        num_models = 2 if run.has_sharded_reference else 1
        terms["layer masks"] = num_models * layer_mask_bytes(model, run.padded_length)
    if _keeps_scores(config, run):  # one more copy in the backward pass, as measured on an H200
        terms["attention scores"] = _score_bytes(config, run)
    if not run.shard.is_sharded:
        terms[GRADIENTS] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if run.on_gpu:  # as measured on an H200 with torch 2.11; on CPUs they are freed
            terms["buckets of the first step"] = terms[GRADIENTS]
    begin, rules = SIMULATORS[run.shard.wrapper], _rules(model, run)
    directions: list[int] = []
    if eva is not None and EVA in recordings.extra:
        before += _find_directions(begin(in_units, rules, {**terms}), recordings)
        directions = eva.state_bytes(recordings.extra[EVA][0], dict(model.named_parameters()))
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


def _batch_size(config: PretrainedConfig, run: PlannedRun) -> BatchSize:
    shares_prompts = run.is_packed and run.objective.samples == "pairs"
    sizes = run.num_read_rows, run.padded_length, run.shard.context_parallel
    keeps_whole = run.shard.context_parallel > 1 and run.objective.compares_whole_sequences
    size = BatchSize(*sizes, run.rows, shares_prompts, keeps_whole)
    size = replace(size, target_length=run.target_length, mask_fraction=run.mask_fraction)
    if isinstance(run.objective, DistillConfig):
        num_targets = run.objective.top_k or int(config.get_text_config().vocab_size)
        return replace(size, num_targets=num_targets, has_targets=run.objective.is_precomputed)
    return size


def _keeps_scores(config: PretrainedConfig, run: PlannedRun) -> bool:
    """Whether attention keeps the scores of all pairs of tokens.

    On a GPU, torch's flash attention supports no float32, and the kernel that does supports no grouped-query heads.
    """
    text: Any = config.get_text_config()
    heads, key_heads = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    is_grouped = bool(heads and key_heads and key_heads < heads)
    return run.on_gpu and is_grouped and run.shard.param_dtype == "float32" and run.model.attention in ("auto", "sdpa")


def _score_bytes(config: PretrainedConfig, run: PlannedRun) -> int:
    """Bytes of the float32 scores of all token pairs in one layer."""
    text: Any = config.get_text_config()
    return 4 * run.num_rows * int(text.num_attention_heads) * max(run.padded_length, run.decoder_length) ** 2


def _math_attention() -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return found


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
    return StepRules(
        reshard=shard.reshard_after_forward,
        prefetch_forward=shard.prefetch_forward or 0,
        prefetch_backward=backward,
        num_micro_batches=run.num_micro_batches,
        sync_every_micro_batch=shard.sync_every_micro_batch or (shard.wrapper == "fsdp1" and run.num_ranks == 1),
        gradient_itemsize=sharding.itemsize(shard.param_dtype),
        casts_gradients=shard.param_dtype != shard.reduce_dtype,
        casts_reduced=shard.reduce_dtype != stored,
        keeps_reduced=shard.replicas > 1,
        copies_reduced=not run.on_gpu,
        offloads_activations=shard.activation_offload,
        has_host_gradients=shard.cpu_offload,
        save_bytes=row_index_bytes(model, run),
    )


def _extra_passes(config: PretrainedConfig, run: PlannedRun) -> tuple[dict[str, ExtraPasses], EvaPass | None]:
    """The passes without gradients that are no evaluations, by phase; and that of `adapter.init=eva` by itself."""
    found: dict[str, ExtraPasses] = {}
    eva = None
    if (completions := Completions.of(run)) is not None:
        found[COMPLETIONS] = completions
    if run.adapter.finds_directions and not run.resumes:
        from fsdp_shard.planning.step.eva_pass import EvaPass  # few plans need it

        found[EVA] = eva = EvaPass(replace(_batch_size(config, run), num_rows=run.num_rows), run.num_ranks)
    return found, eva


def _find_directions(simulator: StepSimulator, recordings: Recordings) -> list[Snapshot]:
    """The snapshots of computing an adapter's initial values."""
    simulator.terms.pop("reference", None)  # the reference is opened later
    simulator.run_without_gradients(EVA, recordings.extra[EVA])
    return simulator.snapshots


def _record(
    config: PretrainedConfig, run: PlannedRun, part: RankPart, extra: Mapping[str, ExtraPasses]
) -> tuple[Callable[[], Recordings], bool]:
    """Return the function that records one micro-batch, and whether the output head computes the loss."""
    model, _ = build_planned(config, run.model, run.adapter, run.shard.param_dtype, run.shard)
    if run.shard.flattens_units:
        for unit in part.units:  # one flat gradient, which covers frozen parameters too
            params = [model.get_parameter(name) for name in unit.parameters]
            if any(param.requires_grad for param in params):
                for param in params:
                    param.requires_grad_(True)
    has_loss_head = run.shard.tensor_parallel == 1 and use_loss_head(  # otherwise the head is divided
        model, run.model.chunked_loss, any_vocabulary=not run.objective.is_cross_entropy
    )
    divide_model(model, run.shard)
    num_parts = run.shard.context_parallel
    if num_parts > 1:
        sharding.divide_attention(model, sharding.chosen_method(run.shard, config))
    size = replace(_batch_size(config, run), upcasts_logits=run.objective.is_cross_entropy and not has_loss_head)
    make = partial(planned_batch, model, run.objective, run.reference_kind, size)
    record = partial(record_passes, model, run.shard, part.units, make, uncast=part.experts, rows=run.rows, extra=extra)
    return record, has_loss_head
