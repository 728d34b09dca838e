"""What an objective provides: the data and the reference that it needs, its loss and its metrics. Imports no torch.

An objective is a file of this folder with its settings and its formula, and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fsdp_shard.models import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fsdp_shard.data import Batch
    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding import ShardedModel
    from fsdp_shard.training.loss.custom_functions import StepSums
    from fsdp_shard.training.loss.device_batch import DeviceBatch
    from fsdp_shard.training.loss.distillation import Targets


class Reference(Protocol):
    """The model that another one is compared with."""

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the sum of the log-probabilities of the labels of each row, float32 [num_rows], without gradients."""


class Teacher(Protocol):
    """The model that another one is to imitate."""

    def targets(self, batch: DeviceBatch) -> Targets:
        """Return its most likely tokens for each label that counts, without gradients."""


@dataclass
class Pass:
    """One forward pass of a step or an evaluation, on this rank.

    Attributes:
        model: The model that is trained.
        batch: The micro-batch.
        divisors: What each term of the loss is divided by, float32 [num_terms].
        sums: Receives the metrics.
        reference: The `Reference` or the `Teacher` of objectives that have one.
        shared: What `ObjectiveConfig.prepare` returned for all passes of the step.
    """

    model: ShardedModel
    batch: DeviceBatch
    divisors: torch.Tensor
    sums: StepSums
    reference: Any = None
    shared: Any = None


@dataclass
class ObjectiveConfig:
    """`objective=sft`: supervised fine-tuning, the cross-entropy, or `loss=module:function`, of every predicted token.

    A subclass is another objective: it adds its settings to `objective.*`.

    Attributes:
        name: Its option of `objective=`.
        samples: The shape of the samples that it needs: `rows`, `pairs` or `labeled` (`data/task.py`).
        tasks: The values of `model.task` that it trains.
        num_terms: Number of means that its loss is the sum of.
        headline: The metrics that a line of progress shows; without any, it shows all.
        is_cross_entropy: Whether the loss is the cross-entropy, so that its exponential is a perplexity.
        num_token_values: Number of float32 values of a token that its loss is computed from, where it compares whole
            sequences: ranks that divide them gather those.
        of_computation: Settings that do not define the loss, so that a run may resume with others.
    """

    name: ClassVar[str] = "sft"
    samples: ClassVar[str] = "rows"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ, MASKED_LM, SEQUENCE_CLASSIFICATION)
    num_terms: ClassVar[int] = 1
    headline: ClassVar[tuple[str, ...]] = ()
    is_cross_entropy: ClassVar[bool] = True
    num_token_values: ClassVar[int] = 1
    of_computation: ClassVar[tuple[str, ...]] = (
        *("reference", "reference_max_memory"),
        *("teacher", "teacher_logits", "teacher_max_memory"),
    )

    @property
    def compares_whole_sequences(self) -> bool:
        """Whether ranks that divide sequences compute the same loss of the whole ones, not each that of its tokens."""
        return not self.is_cross_entropy

    def trained_tokens(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which tokens of `batch` are trained, for people: bool, with the shape of the labels or inputs."""
        from fsdp_shard.data import MASKED

        found: npt.NDArray[np.bool_] = batch.labels != MASKED
        return found

    def counts(self, batch: Batch) -> list[float]:
        """Return, for each term of the loss, the number in `batch` that the term is a mean over."""
        return [float(batch.num_predictions)]

    def reference_kind(self, *, begins_at_base: bool, is_streamed: bool) -> str | None:
        """Return where a run gets its reference from: `adapter`, `precomputed` or `sharded`; None without one.

        Args:
            begins_at_base: Whether training began from the model that is left without the adapter of the run.
            is_streamed: Whether its samples are not known before.
        """
        return None

    def all_counts(self, batch: Batch) -> list[float]:
        """Return the counts of the terms, and the number of tokens."""
        return [*self.counts(batch), float(self.trained_tokens(batch).sum())]

    def prepare(
        self,
        model: ShardedModel,
        batches: Iterable[DeviceBatch],
        reference: Any,
        context: DistributedContext,
    ) -> Any:
        """Compute, without gradients, what the losses of a step have in common; most have nothing.

        A collective if it computes anything.

        Args:
            model: The model.
            batches: All micro-batches of this rank.
            reference: As in `Pass`.
            context: The ranks.
        """
        return None

    def terms(self, forward: Pass) -> torch.Tensor:
        """Run the forward pass and return the sums of the terms of the loss over `divisors`, [num_terms], in nats."""
        from fsdp_shard.training.loss.forward_loss import forward_loss

        return forward_loss(forward.model, forward.batch, forward.divisors[0], forward.sums).reshape(1)


@dataclass
class PreferenceConfig(ObjectiveConfig):
    """The base of objectives that learn from preferences."""

    samples: ClassVar[str] = "pairs"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL,)
    headline: ClassVar[tuple[str, ...]] = ("rewards/margins", "rewards/accuracies")
    is_cross_entropy: ClassVar[bool] = False

    def counts(self, batch: Batch) -> list[float]:
        """Return the number of pairs, or of labeled answers, in `batch`, without those that only fill it up."""
        return [float((batch.answer_sizes[:, 1] > 0).sum())]


PRECOMPUTED, DISPATCHED = "precomputed", "dispatched"
REFERENCES = ("auto", "adapter", PRECOMPUTED, DISPATCHED, "sharded")


@dataclass
class ReferenceConfig(PreferenceConfig):
    """The base of objectives that compare the model with a reference: the one that training began from."""

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
