"""The common parts of objectives for pairs: log-probabilities of both answers, one loss per pair, and metrics.

Samples are pairs: rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of pair i. With packing, a row
holds several pairs, and answers 2i and 2i + 1 of the batch are those of pair i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.objectives.objective import ForwardPass, PreferenceConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pairs:
    """Answers in pairs; each tensor is [num_pairs, 2], the chosen answer first.

    Attributes:
        log_probs: Sum of the log-probabilities of each answer's tokens, float32, in nats.
        lengths: Number of these tokens, float32; 0 for both answers of a pair that only fills up the batch.
        reference: `log_probs` of the reference model; zeros without one.
    """

    log_probs: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor

    @property
    def is_pair(self) -> torch.Tensor:
        """Whether each pair is more than a filler, [num_pairs]."""
        return self.lengths[:, 1] > 0

    @property
    def log_ratios(self) -> torch.Tensor:
        """Log of the ratio between each answer's probability and its reference probability, [num_pairs, 2]."""
        return self.log_probs - self.reference

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability per token of each answer, [num_pairs, 2]."""
        return self.log_probs / self.lengths.clamp(min=1)


def add_metrics(forward: ForwardPass, values: Mapping[str, torch.Tensor], counted: torch.Tensor) -> None:
    """Add the sums of metrics [n] over the elements that are `counted` [n]."""
    import torch

    number = counted.sum()
    for name, each in values.items():
        forward.sums.add_metric(name, torch.where(counted, each.detach().float(), 0.0).sum(), number)


@dataclass
class PairObjective(PreferenceConfig):
    """The base of objectives with a loss for each pair, from the log-probabilities of its answers."""

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """Return the loss of each pair in nats, float32 [num_pairs]."""
        raise NotImplementedError

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        """Return the implicit reward of each answer, float32 [num_pairs, 2]."""
        raise NotImplementedError

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Run the forward pass of both answers and return the sum of the losses over the divisor, [1]."""
        import torch

        pairs = self.run(forward)
        losses = torch.where(pairs.is_pair, self.losses(pairs), 0.0)
        return (losses.sum() / forward.divisors[0]).reshape(1)

    def run(self, forward: ForwardPass) -> Pairs:
        """Run the forward passes of model and reference, and add the metrics."""
        import torch

        from fsdp_shard.training.loss.forward_loss import forward_answers

        reference = None if forward.reference is None else forward.reference.log_probs(forward.batch)
        log_probs = forward_answers(forward.model, forward.batch)
        reference = torch.zeros_like(log_probs) if reference is None else reference
        pairs = Pairs(log_probs.view(-1, 2), forward.batch.answer_lengths.view(-1, 2), reference.view(-1, 2))
        self.add_metrics(forward, pairs)
        return pairs

    def add_metrics(self, forward: ForwardPass, pairs: Pairs) -> None:
        """Add the common metrics: rewards, log-probabilities and lengths of both answers."""
        rewards = self.rewards(pairs).detach()
        chosen, rejected = rewards.unbind(1)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": pairs.log_probs[:, 0],
            "logps/rejected": pairs.log_probs[:, 1],
            "lengths/chosen": pairs.lengths[:, 0],
            "lengths/rejected": pairs.lengths[:, 1],
        }
        add_metrics(forward, metrics, pairs.is_pair)


def smoothed_losses(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return -log sigmoid of the logits [num_pairs] if the fraction `smoothing` of the preferences is wrong."""
    import torch.nn.functional as F

    return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def check_smoothing(value: float, prefix: str) -> None:
    """Raise ConfigError unless label smoothing leaves more right preferences than wrong ones."""
    if value >= 0.5:
        raise ConfigError(
            f"{prefix}label_smoothing={value} is out of range: it must be less than 0.5, or nothing is preferred."
        )
