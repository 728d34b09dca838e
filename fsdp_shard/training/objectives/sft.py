"""`objective=sft`: supervised fine-tuning, the cross-entropy of what the data says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.objective import ObjectiveConfig, Pass

if TYPE_CHECKING:
    import torch

    from fsdp_shard.data import Batch


@dataclass
class SftConfig(ObjectiveConfig):
    """Supervised fine-tuning: the cross-entropy, or `loss=module:function`, of every predicted token."""

    name: ClassVar[str] = "sft"
    help: ClassVar[str] = "supervised fine-tuning"
    samples: ClassVar[str] = "rows"
    tasks: ClassVar[tuple[str, ...]] = ("causal_lm", "seq2seq", "masked_lm", "sequence_classification")
    headline: ClassVar[tuple[str, ...]] = ()
    is_cross_entropy: ClassVar[bool] = True

    def counts(self, batch: Batch) -> list[float]:
        """Return the number of predictions in `batch`."""
        return [float(batch.num_predictions)]

    def terms(self, step: Pass) -> torch.Tensor:
        """Return the sum of the losses of all predictions over the divisor, [1]."""
        from fsdp_shard.training.loss.forward_loss import forward_loss

        return forward_loss(step.model, step.batch, step.divisors[0], step.sums).reshape(1)
