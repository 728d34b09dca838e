"""Log-probabilities of labels, the basis of preference losses."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class LabelLogProbs:
    """The log-probability of each row's label.

    Attributes:
        labels: The labels of all rows, int64 [num_rows].
    """

    num_values: ClassVar[int] = 1

    labels: torch.Tensor

    def select(self, rows: torch.Tensor) -> "LabelLogProbs":
        """Return the function for some of the rows."""
        return LabelLogProbs(self.labels[rows])

    def values(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the log-probabilities in nats [num_rows, 1]."""
        return logits.gather(1, self._labels(logits, part)) - logits.logsumexp(1, keepdim=True)

    def grad_logits(self, logits: torch.Tensor, part: slice, grad_values: torch.Tensor) -> torch.Tensor:
        """Return the gradient [num_rows, vocabulary] of the sum of `grad_values` * values; overwrite the logits."""
        grad_logits = logits.sub_(logits.logsumexp(1, keepdim=True)).exp_().mul_(-grad_values)
        return grad_logits.scatter_add_(1, self._labels(logits, part), grad_values)

    def _labels(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        return self.labels[part, None].to(logits.device)
