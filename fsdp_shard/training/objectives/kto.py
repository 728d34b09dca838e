"""`objective=kto`: Kahneman-Tversky optimization, from single answers labeled good or bad."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.data import LABELED
from fsdp_shard.training.objectives.answer_pairs import add_metrics
from fsdp_shard.training.objectives.objective import ForwardPass, Reference, ReferenceConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fsdp_shard.data import Batch
    from fsdp_shard.training.loss.custom_functions import StepRanks
    from fsdp_shard.training.loss.device_batch import DeviceBatch
    from fsdp_shard.training.loss.forward_loss import WrappedModel


@dataclass
class KtoConfig(ReferenceConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024).

    The loss of a good answer is 1 - sigmoid(beta * (log-ratio - KL)), that of a bad one 1 - sigmoid(beta * (KL -
    log-ratio)). KL is the mean log-ratio of prompts paired with answers to other prompts, over the global batch of a
    step, clamped at 0 and without a gradient.

    Samples have two rows: a prompt with its answer, and the same prompt with the answer to another prompt. With
    packing, they are a window of several prompts with their answers, and a window of the same prompts with other
    answers.
    """

    name: ClassVar[str] = "kto"
    samples: ClassVar[str] = LABELED
    headline: ClassVar[tuple[str, ...]] = ("rewards/chosen", "rewards/rejected", "kl")

    beta: float = setting(0.1, "How strongly the model is kept near the reference.", above=0.0)
    desirable_weight: float = setting(1.0, "Weight of the losses of good answers.", above=0.0)
    undesirable_weight: float = setting(1.0, "Weight of the losses of bad answers.", above=0.0)

    def trained_tokens(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which tokens belong to answers, excluding the answers to other prompts."""
        found = super().trained_tokens(batch)
        found[1::2] = False
        return found

    def prepare(
        self,
        model: WrappedModel,
        batches: Iterable[DeviceBatch],
        reference: Reference | None,
        context: StepRanks,
    ) -> torch.Tensor:
        """Return the KL over all batches of all ranks, a scalar; a collective."""
        import torch

        from fsdp_shard.training.loss.forward_loss import forward_answers

        assert reference is not None
        total = torch.zeros(2, dtype=torch.float64, device=context.device)
        with torch.no_grad():
            for batch in batches:
                others = batch.of_row(1)
                ratios = forward_answers(model, others) - reference.log_probs(others)
                is_sample = others.answer_lengths > 0
                total += torch.stack([torch.where(is_sample, ratios, 0.0).sum(), is_sample.sum()]).double()
        context.all_reduce_(total)
        return (total[0] / total[1].clamp(min=1)).clamp(min=0).float()

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Run the forward pass of the answers and return the sum of their losses divided by the divisor, [1]."""
        import torch

        from fsdp_shard.training.loss.forward_loss import forward_answers

        assert forward.reference is not None
        own, kl = forward.batch.of_row(0), forward.shared
        log_probs, lengths = forward_answers(forward.model, own), own.answer_lengths
        ratios = log_probs - forward.reference.log_probs(own)
        is_sample, is_good = lengths > 0, forward.batch.extras["desirable"] > 0
        good = self.desirable_weight * (1 - torch.sigmoid(self.beta * (ratios - kl)))
        bad = self.undesirable_weight * (1 - torch.sigmoid(self.beta * (kl - ratios)))
        rewards = self.beta * ratios
        for name, counted in (("chosen", is_sample & is_good), ("rejected", is_sample & ~is_good)):
            of_each = {"rewards": rewards, "logps": log_probs, "lengths": lengths}
            add_metrics(forward, {f"{kind}/{name}": values for kind, values in of_each.items()}, counted)
        add_metrics(forward, {"kl": kl.expand(len(ratios))}, is_sample)
        losses = torch.where(is_sample, torch.where(is_good, good, bad), 0.0)
        return (losses.sum() / forward.divisors[0]).reshape(1)
