"""One micro-batch of a planned run; the objective itself computes its losses on fake tensors."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.data import LABELED, PAIRS
from fsdp_shard.distributed import OnlyRank
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.recording.fake_attention import FULL, PACKED, PADDED
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.sharding import ContextRanks, WholeSequence, chunks_of_ranks, context_method_of
from fsdp_shard.training import (
    LOSS_CHUNK_BYTES,
    CustomFunctions,
    DeviceBatch,
    DistillConfig,
    ForwardPass,
    ObjectiveConfig,
    PackedAnswers,
    StepSums,
    Targets,
    adapters_disabled,
    cross_entropy_chunk_bytes,
    forward_answers,
)

_CPU = torch.device("cpu")
_TOKEN_BYTES = 8  # int64
_TARGET_BYTES = 8  # a float32 and an int32
_MAX_CHUNKS = 8
_MASKED_DEVIATIONS = 5  # of the number of masked tokens; exceeded once in three million micro-batches


@dataclass(frozen=True)
class _UnshardedModel:
    """An unsharded model in place of the loop's sharded one."""

    module: nn.Module


@dataclass(frozen=True, kw_only=True)
class _RankAlone(OnlyRank):
    """A rank of a step without the others, on the device of fake tensors."""

    device: torch.device = _CPU


class _SilentRanks(ContextRanks):
    """Ranks that divide sequences, with only this one present: nothing is sent."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        pass

    def begin_send_to_next(self, received: torch.Tensor, sent: torch.Tensor) -> list[Any]:
        return []


@dataclass(frozen=True)
class _FakeReference:
    """The reference or the teacher of a planned run.

    Attributes:
        model: The model.
        kind: As in `PlannedRun.reference_kind`.
        leaves_adapter_out: Whether a reference is the model without its adapter.
        recorder: Tracks which of the models runs.
        targets_of_batch: Stored teacher outputs for the predictions that are planned individually.
        num_targets: Number of tokens that a teacher provides per prediction.
        num_predictions: Number of all predictions.
        held: Receives what the objective holds until it has the loss.
    """

    model: _UnshardedModel
    kind: str | None
    leaves_adapter_out: bool
    recorder: Recorder
    targets_of_batch: Targets | None
    num_targets: int
    num_predictions: int
    held: list[Targets] = field(default_factory=list)

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        if self.kind not in ("adapter", "sharded"):
            return torch.zeros(len(batch.labels) if batch.packed is None else len(batch.packed.sizes))
        self.recorder.is_reference = self.kind == "sharded"
        try:
            with torch.no_grad(), adapters_disabled(self.model.module) if self.leaves_adapter_out else nullcontext():
                return forward_answers(self.model, batch)
        finally:
            self.recorder.is_reference = False

    def targets(self, batch: DeviceBatch) -> Targets:
        number, k = len(batch.label_positions), self.num_targets
        if self.targets_of_batch is not None:
            whole = self.targets_of_batch
        else:  # a teacher that runs alongside: log-probabilities and ids in one float32 array, and a copy of the ids
            of_all = self.num_predictions
            values, ids = torch.zeros((of_all, 2 * k)), torch.zeros((of_all, k), dtype=torch.int32)
            whole = Targets(values[:number, :k], ids[:number])
        if batch.sequence is None:
            return whole
        # If sequences are divided, a rank copies the outputs of its own tokens, for the loss to keep.
        self.held.append(whole)
        own = batch.labels.numel()
        return Targets(torch.zeros((own, k))[:number], torch.zeros((own, k), dtype=torch.int32)[:number])


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch of a planned run in a fake tensor mode, which runs what a step and an evaluation run.

    Attributes:
        model: The model.
        batch: The micro-batch.
        objective: The training objective.
        reference: The reference model or the teacher.
    """

    model: _UnshardedModel
    batch: DeviceBatch
    objective: ObjectiveConfig
    reference: _FakeReference

    def prepare(self) -> Any:
        """Compute what the losses of a step share."""
        return self.objective.prepare(self.model, [self.batch], self.reference, _RankAlone())

    def loss(self, shared: Any) -> torch.Tensor:
        """Run the forward pass and return the loss."""
        divisors = torch.ones(self.objective.num_terms)
        sums = StepSums(CustomFunctions(), _RankAlone())
        reference = replace(self.reference, held=[])
        forward = ForwardPass(self.model, self.batch, divisors, sums, reference, shared)
        return self.objective.terms(forward).sum()


@dataclass(frozen=True)
class BatchSize:
    """The size of a micro-batch.

    Attributes:
        num_rows: Number of sequences.
        length: Number of tokens of each sequence on this rank.
        num_parts: Number of ranks that divide each sequence.
        rows: FULL, PADDED (with a token mask), or PACKED (with positions).
        shares_prompts: Whether rows hold pairs that share prompts, and so have segments.
        keeps_whole: Whether ranks that divide sequences also hold the tokens of whole sequences, to compare answers.
        num_targets: Number of teacher tokens per prediction.
        has_targets: Whether the batch contains them, as with a teacher that ran before training.
        upcasts_logits: Whether the logits of all predictions exist, and the loss upcasts them in chunks.
        target_length: Number of tokens per target of a seq2seq model; None for `length`.
        mask_fraction: Fraction of the tokens that a masked language model predicts.
    """

    num_rows: int
    length: int
    num_parts: int = 1
    rows: str = FULL
    shares_prompts: bool = False
    keeps_whole: bool = False
    num_targets: int = 0
    has_targets: bool = False
    upcasts_logits: bool = False
    target_length: int | None = None
    mask_fraction: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig, run: PlannedRun) -> Self:
        """Return the size of a micro-batch of `run`; `config` is the model's."""
        num_parts, num_targets = run.shard.context_parallel, 0
        if isinstance(run.objective, DistillConfig):
            num_targets = run.objective.num_top_tokens(config)
        return cls(
            run.num_read_rows,
            run.padded_length,
            num_parts,
            run.rows,
            shares_prompts=run.is_packed and run.objective.samples == PAIRS,
            keeps_whole=num_parts > 1 and run.objective.compares_whole_sequences,
            num_targets=num_targets,
            has_targets=isinstance(run.objective, DistillConfig) and run.objective.is_precomputed,
            target_length=run.target_length,
            mask_fraction=run.mask_fraction,
        )

    @property
    def num_label_tokens(self) -> int:
        """Number of tokens with labels on the rank."""
        return self.num_rows * (self.target_length or self.length)

    @property
    def num_trained_labels(self) -> int:
        """Maximum number of labels that count. A masked language model draws them; almost no micro-batch has more."""
        if self.mask_fraction is None:
            return self.num_label_tokens
        mean = self.num_label_tokens * self.mask_fraction
        deviation = sqrt(mean * (1 - self.mask_fraction))
        return min(self.num_label_tokens, ceil(mean + _MASKED_DEVIATIONS * deviation))

    @property
    def num_predictions(self) -> int:
        """Number of predictions whose losses the rank computes."""
        return self.num_rows * self.length * (self.num_parts if self.keeps_whole else 1)


def planned_batch(
    model: PreTrainedModel,
    objective: ObjectiveConfig,
    reference_kind: str | None,
    size: BatchSize,
    recorder: Recorder,
    *,
    leaves_adapter_out: bool = False,
) -> PlannedBatch:
    """Make a micro-batch in a fake tensor mode. If sequences are divided, it holds the rank's part only.

    Args:
        model: The model, with a loss head if training has one.
        objective: The training objective.
        reference_kind: As in `PlannedRun.reference_kind`.
        size: The size of the micro-batch.
        recorder: Ignores the micro-batch's tensors, and is notified of which model runs.
        leaves_adapter_out: Whether a reference is the model without its adapter.
    """
    batch, plain = _batch(model, size), _UnshardedModel(model)
    recorder.num_recorded_predictions = num_recorded_predictions(model)
    batch = replace(batch, label_positions=batch.label_positions[: recorder.num_recorded_predictions])
    if size.upcasts_logits:  # the loss makes a pass per chunk of labels, each with the same memory
        batch = replace(batch, labels=batch.labels.flatten()[: _num_labels(model, batch.labels.numel())])
    if size.rows == PACKED and size.num_parts == 1:
        batch.inputs["position_ids"] = torch.zeros((size.num_rows, size.length), dtype=torch.long)
    if size.rows == PADDED:
        batch.inputs["attention_mask"] = torch.ones((size.num_rows, size.length), dtype=torch.long)
    if size.shares_prompts:
        batch = _with_pairs(batch)
    if objective.samples == LABELED:
        batch.extras["desirable"] = torch.zeros(size.num_rows // 2)
        if size.rows == PACKED:
            batch = _with_an_answer_a_row(batch)
    targets = None
    if size.has_targets:
        shape = len(batch.label_positions), size.num_targets
        targets = Targets(torch.zeros(shape), torch.zeros(shape, dtype=torch.int32))
        recorder.ignore([targets.log_probs, targets.tokens])
    recorder.ignore([*batch.tensors()])
    reference = _FakeReference(
        plain, reference_kind, leaves_adapter_out, recorder, targets, size.num_targets, size.num_predictions
    )
    return PlannedBatch(plain, batch, objective, reference)


def _batch(model: PreTrainedModel, size: BatchSize) -> DeviceBatch:
    config: Any = model.config
    num_rows, length, num_parts = size.num_rows, size.length, size.num_parts
    inputs = {"input_ids": torch.zeros((num_rows, length), dtype=torch.long)}
    labels = torch.zeros((num_rows, size.target_length or length), dtype=torch.long)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.zeros_like(labels)
    if "SequenceClassification" in type(model).__name__:
        labels = torch.zeros((num_rows,), dtype=torch.long)
    label_positions = torch.zeros(min(labels.numel(), size.num_trained_labels), dtype=torch.long)
    method = context_method_of(model)
    if method is None:
        return DeviceBatch(inputs, labels, label_positions)
    ranks = _SilentRanks(chunks_of_ranks(num_parts, method))
    whole = torch.zeros((num_rows, length * num_parts), dtype=torch.long)
    inputs |= {name: torch.ones((num_rows, length), dtype=torch.long) for name in ("position_ids", "attention_mask")}
    sequence = WholeSequence(ranks, whole)
    if size.rows == PACKED:  # two documents in each chunk
        edges = np.broadcast_to(np.array([0, 1]), (num_rows, ranks.num_chunks, 2))
        sequence = replace(sequence, documents=torch.zeros_like(whole), edges=edges)
    return DeviceBatch(inputs, labels, label_positions, sequence=sequence)


def _with_an_answer_a_row(batch: DeviceBatch) -> DeviceBatch:
    """The batch with a window of one answer in each row; each pass uses every other row."""
    num_rows, _ = batch.inputs["input_ids"].shape
    num_trained_labels = min(len(batch.label_positions), batch.labels[0::2].numel())
    sizes = _shares(num_trained_labels, num_rows // 2)
    of_both = tuple(size for size in sizes for _ in range(2))
    return replace(batch, packed=PackedAnswers(None, of_both, torch.ones(num_rows), has_two_rows=True))


def _with_pairs(batch: DeviceBatch) -> DeviceBatch:
    """The batch with a prompt-sharing pair in each row; the model itself makes a mask of the same size."""
    num_rows, length = batch.inputs["input_ids"].shape
    num_answers = 2 * num_rows
    if batch.labels.ndim == 1:  # a classifier reads the last token of each answer
        labels, label_positions = (
            torch.zeros((num_rows, length), dtype=torch.long),
            torch.zeros(num_answers, dtype=torch.long),
        )
        batch = replace(batch, labels=labels, label_positions=label_positions)
    return replace(
        batch, packed=PackedAnswers(None, _shares(len(batch.label_positions), num_answers), torch.ones(num_answers))
    )


def _shares(number: int, num_parts: int) -> tuple[int, ...]:
    """Divide `number` into `num_parts` parts; the last one takes the remainder."""
    size, rest = divmod(number, num_parts)
    return (*(size for _ in range(num_parts - 1)), size + rest)


def num_recorded_predictions(model: PreTrainedModel) -> int:
    """Number of predictions planned individually: enough loss chunks, which all need the same memory."""
    config: Any = model.config.get_text_config()
    return _MAX_CHUNKS * max(1, LOSS_CHUNK_BYTES // (4 * int(getattr(config, "vocab_size", 1))))


def _num_labels(model: PreTrainedModel, number: int) -> int:
    """Number of labels, at most `number`, in the chunks of upcast logits that are planned individually."""
    config: Any = model.config.get_text_config()
    row_bytes = 4 * int(getattr(config, "vocab_size", 1))
    return min(number, _MAX_CHUNKS * max(1, cross_entropy_chunk_bytes("cpu", number * row_bytes) // row_bytes))


def batch_bytes(model: PreTrainedModel, size: BatchSize) -> int:
    """Bytes of a micro-batch on a device: tokens, labels, and the positions that count.

    Packed documents add positions, packed pairs also segments, and padded rows a mask. If ranks divide sequences, there
    are the positions of the rank's tokens and of all tokens, and a mask of ones; if the whole sequences are kept, also
    their tokens, labels and counts. Predictions that are not planned individually add their labels and
    log-probabilities. A teacher that ran before training adds a log-probability and an id for each of its tokens.
    """
    config: Any = model.config
    divided = 2 + size.num_parts * (4 if size.keeps_whole else 1) if size.num_parts > 1 else 0
    num_arrays = 1 + (size.rows != FULL) + size.shares_prompts + divided
    num_values = size.num_rows * size.length * num_arrays
    num_values += size.num_label_tokens * (1 + bool(config.is_encoder_decoder)) + size.num_trained_labels
    num_values += 2 * max(0, size.num_trained_labels - num_recorded_predictions(model))
    targets = _TARGET_BYTES * size.num_targets * size.num_predictions if size.has_targets else 0
    return num_values * _TOKEN_BYTES + targets
