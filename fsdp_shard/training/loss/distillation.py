"""The distillation loss over a teacher's most likely tokens, and their extraction from the teacher's logits."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Targets:
    """A teacher's most likely tokens for each predicted token, the likeliest first.

    Attributes:
        log_probs: Their log-probabilities in nats under the whole vocabulary, float32 [num_predictions, k].
        tokens: Their ids, integers [num_predictions, k].
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class TopTokens:
    """The `k` most likely tokens of each row, for `split_targets`; without a gradient."""

    k: int

    @property
    def num_values(self) -> int:
        """Number of log-probabilities and ids."""
        return 2 * self.k

    def select(self, rows: torch.Tensor) -> "TopTokens":
        """Return the function for some of the rows, which is the same."""
        return self

    def values(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """Return log-probabilities and token ids, float32 [num_rows, 2 * k]."""
        highest = logits.topk(self.k, dim=1)  # float32 represents every integer up to 2^24, and so every id
        return torch.cat([highest.values - logits.logsumexp(1, keepdim=True), highest.indices.float()], 1)

    def grad_logits(self, logits: torch.Tensor, part: slice, grad_values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a teacher is not trained")


def split_targets(values: torch.Tensor) -> Targets:
    """Split the values of `TopTokens`, float32 [num_predictions, 2 * k]."""
    log_probs, tokens = values.chunk(2, dim=1)
    return Targets(log_probs, tokens.int())


@dataclass(frozen=True)
class StudentTerms:
    """A student's KL divergence, cross-entropy and agreement with the teacher, for each row.

    The divergence is KL(teacher || student). The teacher's distribution over its k tokens is normalized to 1; the
    student's is over the whole vocabulary; both use logits divided by `temperature`. For the student's logits z it is
    sum_i p_i (log p_i - log softmax(z / T)_i) with p = softmax(log_probs / T).

    Attributes:
        labels: The labels of all rows, int64 [num_rows].
        targets: The teacher's tokens of all rows.
        temperature: T.
    """

    num_values: ClassVar[int] = 3

    labels: torch.Tensor
    targets: Targets
    temperature: float

    def select(self, rows: torch.Tensor) -> "StudentTerms":
        """Return the function for some of the rows."""
        targets = Targets(self.targets.log_probs[rows], self.targets.tokens[rows])
        return replace(self, labels=self.labels[rows], targets=targets)

    def values(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """Return KL and cross-entropy in nats, and 1 where the likeliest tokens agree, else 0, [num_rows, 3]."""
        labels, tokens, probs = self._of(logits, part)
        same = (logits.argmax(1) == tokens[:, 0]).float()
        plain = logits.logsumexp(1) - logits.gather(1, labels).squeeze(1)
        scaled = logits.div_(self.temperature)
        expected = (probs * scaled.gather(1, tokens)).sum(1)
        divergence = scaled.logsumexp(1) - expected - torch.special.entr(probs).sum(1)
        return torch.stack([divergence, plain, same], 1)

    def grad_logits(self, logits: torch.Tensor, part: slice, grad_values: torch.Tensor) -> torch.Tensor:
        """Return the gradient [num_rows, vocabulary] of the sum of `grad_values` * values; overwrite the logits."""
        labels, tokens, probs = self._of(logits, part)
        of_divergence, of_plain = grad_values[:, :1] / self.temperature, grad_values[:, 1:2]
        grad_logits = (logits / self.temperature).softmax(1).mul_(of_divergence)
        grad_logits.scatter_add_(1, tokens, -probs * of_divergence)
        grad_logits += logits.sub_(logits.logsumexp(1, keepdim=True)).exp_().mul_(of_plain)
        return grad_logits.scatter_add_(1, labels, -of_plain)

    def _of(self, logits: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Labels [num_rows, 1], the teacher's tokens and their probabilities [num_rows, k]."""
        labels, tokens = self.labels[part, None].to(logits.device), self.targets.tokens[part].to(logits.device).long()
        return labels, tokens, (self.targets.log_probs[part].to(logits.device) / self.temperature).softmax(1)
