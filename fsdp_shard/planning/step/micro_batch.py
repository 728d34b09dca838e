"""The loss of one micro-batch of a planned run, computed by the objective itself on fake tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.planning.step.block_profiles import Recorder
from fsdp_shard.sharding import ContextRanks, WholeSequence, divided_by
from fsdp_shard.training import (
    DeviceBatch,
    ObjectiveConfig,
    OwnFunctions,
    PackedAnswers,
    Pass,
    StepSums,
    Targets,
    forward_answers,
    forward_log_probs,
)

_TOKEN_BYTES = 8  # int64


@dataclass(frozen=True)
class _Plain:
    """A model that is not sharded, where the loop has one that is."""

    module: nn.Module


class _SilentRanks(ContextRanks):
    """Ranks that divide sequences, of which only this one is there: nothing is sent."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        pass

    def begin_to_pass_on(self, received: torch.Tensor, sent: torch.Tensor) -> list[Any]:
        return []


@dataclass(frozen=True)
class _Compared:
    """The reference or the teacher of a planned run.

    Attributes:
        model: The model.
        kind: As in `PlannedRun.reference_kind`.
        recorder: Knows which of the models runs.
        num_targets: Number of tokens that a teacher gives for each prediction.
    """

    model: _Plain
    kind: str | None
    recorder: Recorder
    num_targets: int

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        if self.kind not in ("adapter", "sharded"):
            return torch.zeros(len(batch.labels) if batch.packed is None else len(batch.packed.sizes))
        self.recorder.is_reference = self.kind == "sharded"
        try:
            with torch.no_grad():
                return forward_answers(self.model, batch)  # type: ignore[arg-type]  # it has the module
        finally:
            self.recorder.is_reference = False

    def targets(self, batch: DeviceBatch) -> Targets:
        shape = len(batch.counted), self.num_targets
        return Targets(torch.zeros(shape), torch.zeros(shape, dtype=torch.int32))


def micro_batch_loss(
    model: PreTrainedModel,
    objective: ObjectiveConfig,
    reference_kind: str | None,
    num_rows: int,
    length: int,
    num_parts: int = 1,
    *,
    is_packed: bool = False,
) -> Callable[[Recorder], torch.Tensor]:
    """What computes the loss of one micro-batch in a fake tensor mode.

    Args:
        model: The model, which has a loss head where training has one.
        objective: What it is trained for.
        reference_kind: As in `PlannedRun.reference_kind`.
        num_rows: Number of sequences.
        length: Number of tokens that this rank has of each.
        num_parts: Number of ranks that divide each sequence.
        is_packed: Whether rows hold several documents, or pairs that share prompts, and so have positions.
    """

    def compute(recorder: Recorder) -> torch.Tensor:
        batch, plain = _batch(model, num_rows, length, num_parts), _Plain(model)
        divisors, context = torch.ones(objective.num_terms), SimpleNamespace(device=torch.device("cpu"))
        if is_packed and num_parts == 1:
            batch.inputs["position_ids"] = torch.zeros((num_rows, length), dtype=torch.long)
            batch = _with_pairs(batch) if objective.samples == "pairs" else batch
        recorder.ignore([*batch.tensors(), divisors])
        reference = _Compared(plain, reference_kind, recorder, getattr(objective, "top_k", None) or 256)
        sums = StepSums(OwnFunctions(), context)  # type: ignore[arg-type]  # of which it uses the device
        step = Pass(plain, batch, divisors, sums, reference)  # type: ignore[arg-type]  # it has the module
        try:
            return objective.terms(step).sum()
        except RuntimeError:
            if recorder.events:
                raise
        # Some choose rows by the values of labels, which fake tensors do not have.
        compared = reference.log_probs(batch)
        own = forward_log_probs(plain, batch).sum(-1)  # type: ignore[arg-type]  # it has the module
        return (own - compared).sum()

    return compute


def _batch(model: PreTrainedModel, num_rows: int, length: int, num_parts: int) -> DeviceBatch:
    config: Any = model.config
    names = ["input_ids", *(["decoder_input_ids"] if config.is_encoder_decoder else [])]
    inputs = {name: torch.zeros((num_rows, length), dtype=torch.long) for name in names}
    is_classifier = "SequenceClassification" in type(model).__name__
    labels = torch.zeros((num_rows,) if is_classifier else (num_rows, length), dtype=torch.long)
    counted = torch.zeros(labels.numel(), dtype=torch.long)
    method = divided_by(model)
    if method is None:
        return DeviceBatch(inputs, labels, counted)
    ranks = _SilentRanks.of(SimpleNamespace(num_context_ranks=num_parts, rank=0, context_group=None), method)  # type: ignore[arg-type]  # as much of a context as it uses
    whole = torch.zeros((num_rows, -(-length // ranks.num_chunks) * ranks.num_chunks * num_parts), dtype=torch.long)
    inputs |= {name: torch.ones((num_rows, length), dtype=torch.long) for name in ("position_ids", "attention_mask")}
    return DeviceBatch(inputs, labels, counted, sequence=WholeSequence(ranks, whole))


def _with_pairs(batch: DeviceBatch) -> DeviceBatch:
    """The batch with a pair in each row that share a prompt; the model makes a mask of the same size by itself."""
    num_rows, length = batch.inputs["input_ids"].shape
    if batch.labels.ndim == 1:  # a classifier, which reads the last token of each answer
        sizes = (1,) * (2 * num_rows)
        labels, counted = torch.zeros((num_rows, length), dtype=torch.long), torch.zeros(len(sizes), dtype=torch.long)
        batch = replace(batch, labels=labels, counted=counted)
    else:
        sizes = (length // 2, length - length // 2) * num_rows
    return replace(batch, packed=PackedAnswers(None, sizes, torch.ones(len(sizes))))


def batch_bytes(
    model: PreTrainedModel,
    num_rows: int,
    length: int,
    num_parts: int = 1,
    *,
    is_packed: bool = False,
    has_segments: bool = False,
) -> int:
    """Bytes of a micro-batch on a device: the tokens, labels, and the positions that count.

    With packed documents positions too, and with packed pairs also the segments. Where `num_parts` ranks divide
    sequences: the positions of the rank's tokens and of all, and a mask of ones.
    """
    config: Any = model.config
    num_arrays = (
        3 + bool(config.is_encoder_decoder) + is_packed + has_segments + (2 + num_parts if num_parts > 1 else 0)
    )
    return num_rows * length * _TOKEN_BYTES * num_arrays
