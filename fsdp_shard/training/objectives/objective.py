"""The interface of an objective: the data and reference that it needs, its loss and its metrics. Imports no torch.

An objective is a file of this folder with its settings and its formula, and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fsdp_shard.data import PAIRS, ROWS
from fsdp_shard.models import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fsdp_shard.data import Batch
    from fsdp_shard.training.loss.custom_functions import StepRanks, StepSums
    from fsdp_shard.training.loss.device_batch import DeviceBatch
    from fsdp_shard.training.loss.distillation import Targets
    from fsdp_shard.training.loss.forward_loss import WrappedModel


class Reference(Protocol):
    """The model with which the trained model is compared."""

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the log-probability of each answer, summed over its trained labels, without gradients.

        float32 [num_answers], in the order of the rows; a packed row has several answers.
        """


class Teacher(Protocol):
    """The model that the trained model imitates."""

    def targets(self, batch: DeviceBatch) -> Targets:
        """Return the teacher's most likely tokens for each trained label, without gradients."""


@dataclass
class ForwardPass:
    """One forward pass of a step or an evaluation, on this rank.

    Attributes:
        model: The trained model.
        batch: The micro-batch.
        divisors: Divisor of each loss term, float32 [num_terms].
        sums: Receives the metrics.
        reference: The `Reference` or `Teacher`, for objectives that have one.
        shared: Result of `ObjectiveConfig.prepare`, shared by all passes of the step.
    """

    model: WrappedModel
    batch: DeviceBatch
    divisors: torch.Tensor
    sums: StepSums
    reference: Any = None
    shared: Any = None


@dataclass
class ObjectiveConfig:
    """`objective=sft`: supervised fine-tuning, the cross-entropy, or `loss=module:function`, of every predicted token.

    Each subclass is another objective, and adds its settings to `objective.*`.

    Attributes:
        name: Its name in `objective=`.
        samples: Required shape of the samples: ROWS, PAIRS or LABELED (`data/kinds/kind.py`).
        tasks: Supported values of `model.task`.
        num_terms: Number of means whose sum is the loss.
        headline: Metrics shown in a progress line; if empty, all are shown.
        is_cross_entropy: Whether the loss is the cross-entropy, so that its exponential is a perplexity.
        num_token_values: Number of float32 values per token from which the loss is computed, if it compares whole
            sequences; context-parallel ranks gather these.
        of_computation: Settings that do not define the loss, so a resume may change them.
    """

    name: ClassVar[str] = "sft"
    samples: ClassVar[str] = ROWS
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ, MASKED_LM, SEQUENCE_CLASSIFICATION)
    num_terms: ClassVar[int] = 1
    headline: ClassVar[tuple[str, ...]] = ()
    is_cross_entropy: ClassVar[bool] = True
    num_token_values: ClassVar[int] = 1
    of_computation: ClassVar[tuple[str, ...]] = (
        "reference",
        "reference_max_memory",
        "teacher",
        "teacher_logits",
        "teacher_max_memory",
    )

    @property
    def compares_whole_sequences(self) -> bool:
        """Whether context-parallel ranks compute the same loss over whole sequences, not each over its own tokens."""
        return not self.is_cross_entropy

    def trained_tokens(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which tokens of `batch` are counted as trained: bool, with the shape of the labels or inputs.

        Their number is `tokens` in metrics.jsonl and trainer.json; the loss is divided by `counts`.
        """
        from fsdp_shard.data import IGNORE_INDEX

        found: npt.NDArray[np.bool_] = batch.labels != IGNORE_INDEX
        return found

    def counts(self, batch: Batch) -> list[float]:
        """Return, for each loss term, how many items of `batch` the term is averaged over."""
        return [float(batch.num_predictions)]

    def reference_kind(self, *, begins_at_base: bool, is_streamed: bool) -> str | None:
        """Return the source of a run's reference: `adapter`, `precomputed` or `sharded`; None without a reference.

        Args:
            begins_at_base: Whether training began from the model that remains when the run's adapter is disabled.
            is_streamed: Whether the samples are not known in advance.
        """
        return None

    def all_counts(self, batch: Batch) -> list[float]:
        """Return the counts of the terms, followed by the number of tokens."""
        return [*self.counts(batch), float(self.trained_tokens(batch).sum())]

    def prepare(
        self,
        model: WrappedModel,
        batches: Iterable[DeviceBatch],
        reference: Any,
        context: StepRanks,
    ) -> Any:
        """Compute, without gradients, a value shared by the losses of a step; most objectives have none.

        A collective if the objective computes a value.

        Args:
            model: The model.
            batches: All micro-batches of this rank.
            reference: As in `ForwardPass`.
            context: The ranks.
        """
        return None

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Run the forward pass and return the sums of the loss terms divided by `divisors`, [num_terms], in nats."""
        from fsdp_shard.training.loss.forward_loss import forward_loss

        return forward_loss(forward.model, forward.batch, forward.divisors[0], forward.sums).reshape(1)


@dataclass
class PreferenceConfig(ObjectiveConfig):
    """The base of objectives that learn from preferences."""

    samples: ClassVar[str] = PAIRS
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)
    headline: ClassVar[tuple[str, ...]] = ("rewards/margins", "rewards/accuracies")
    is_cross_entropy: ClassVar[bool] = False

    def counts(self, batch: Batch) -> list[float]:
        """Return the number of pairs or labeled answers in `batch`, excluding fillers."""
        return [float((batch.answer_sizes[:, 1] > 0).sum())]


PRECOMPUTED, DISPATCHED = "precomputed", "dispatched"
REFERENCES = ("auto", "adapter", PRECOMPUTED, DISPATCHED, "sharded")


@dataclass
class ReferenceConfig(PreferenceConfig):
    """The base of objectives that compare the model with a reference, the model that training began from."""

    reference: str = setting(
        "auto",
        "Where the reference's log-probabilities come from. adapter: the model itself without its adapter; "
        "precomputed: one pass over the data before training, kept in data.cache_dir, by the model, sharded as the run "
        "is; dispatched: the same, by the model on GPU, CPU and disk, on each rank; sharded: a frozen copy of the "
        "model, sharded like it; auto: adapter with an adapter that is new, precomputed otherwise (sharded for "
        "streamed data).",
        choices=REFERENCES,
    )
    # Any, as in DispatchConfig.
    reference_max_memory: Any = setting(
        None,
        "With reference=dispatched, memory for the pass on each rank, such as {0: 20GB, cpu: 64GB}; what does not fit "
        "is read from the disk as it runs. Of several ranks on a machine, each uses its own GPU, so name all: "
        "{0: 20GB, 1: 20GB, cpu: 64GB}. Default: the memory that is free.",
    )

    def reference_kind(self, *, begins_at_base: bool, is_streamed: bool) -> str | None:
        if self.reference != "auto":
            return PRECOMPUTED if self.reference == DISPATCHED else self.reference
        return "adapter" if begins_at_base else "sharded" if is_streamed else PRECOMPUTED
