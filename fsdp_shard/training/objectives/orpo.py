"""`objective=orpo`: odds ratio preference optimization, without a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.answer_pairs import PairObjective, Pairs, add_metrics
from fsdp_shard.training.objectives.objective import ForwardPass
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch

    from fsdp_shard.data import Batch
    from fsdp_shard.training.loss.device_batch import DeviceBatch


_CERTAIN = -1e-7  # the largest mean log-probability whose odds are finite in float32


@dataclass
class OrpoConfig(PairObjective):
    """Odds ratio preference optimization (Hong et al., 2024): cross-entropy of chosen answers plus an odds ratio term.

    The term is -beta * log sigmoid(log of the odds ratio of both answers). An answer's probability is the geometric
    mean over its tokens.
    """

    name: ClassVar[str] = "orpo"
    num_terms: ClassVar[int] = 2

    beta: float = setting(0.1, "Weight of the odds ratio (lambda in the paper).", above=0.0)
    learn_prompts: bool = setting(
        False, "Compute the cross-entropy of prompts and chosen answers, as in TRL, rather than only of the answers."
    )

    def counts(self, batch: Batch) -> list[float]:
        """Return the number of pairs, and the number of tokens in the cross-entropy."""
        from fsdp_shard.data import IGNORE_INDEX, NUM_PARTS

        of_pairs = super().counts(batch)
        if not self.learn_prompts:
            return [*of_pairs, float(batch.answer_sizes[:, 0].sum())]
        if batch.segments is not None:
            return [*of_pairs, float((batch.segments % NUM_PARTS != 0).sum())]
        is_answer = batch.labels[0::2] != IGNORE_INDEX
        ends = is_answer.shape[1] - is_answer[:, ::-1].argmax(axis=1)  # all earlier tokens are predicted, too
        return [*of_pairs, float(ends[is_answer.any(axis=1)].sum())]

    def terms(self, forward: ForwardPass) -> torch.Tensor:
        """Return the sums of the odds ratio term and of the cross-entropy, divided by their divisors, [2]."""
        import torch

        from fsdp_shard.data import IGNORE_INDEX
        from fsdp_shard.training.loss.forward_loss import forward_log_probs

        batch, answers = forward.batch, forward.batch.labels != IGNORE_INDEX
        if self.learn_prompts:
            batch = batch.with_labels(_with_prompts(batch))
        log_probs = forward_log_probs(forward.model, batch)
        of_answers = forward.batch.answer_sums(torch.where(answers, log_probs, 0.0))
        lengths = forward.batch.answer_lengths
        pairs = Pairs(of_answers.view(-1, 2), lengths.view(-1, 2), torch.zeros_like(of_answers).view(-1, 2))
        self.add_metrics(forward, pairs)
        ratios = torch.where(pairs.is_pair, self.losses(pairs), 0.0)
        add_metrics(forward, {"log_odds_ratio": -ratios / self.beta}, pairs.is_pair)
        in_chosen = _in_chosen(batch)
        total = -torch.where(in_chosen, log_probs, 0.0).sum()
        forward.sums.add_metric("nll", total, (in_chosen & (batch.labels != IGNORE_INDEX)).sum())
        return torch.stack([ratios.sum(), total]) / forward.divisors

    def losses(self, pairs: Pairs) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        chosen, rejected = pairs.means.unbind(1)
        # A filler has probability 1, whose odds are infinite.
        # The same holds for an answer that is certain in float32; it has nothing left to learn.
        chosen, rejected = (torch.where(pairs.is_pair, each, -1.0).clamp(max=_CERTAIN) for each in (chosen, rejected))
        odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        return -self.beta * F.logsigmoid(odds)

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.beta * pairs.means


def _in_chosen(batch: DeviceBatch) -> torch.Tensor:
    """Whether tokens belong to chosen answers or their prompts, bool [num_rows, length]."""
    import torch

    from fsdp_shard.data import NUM_PARTS

    if batch.packed is None or batch.packed.segments is None:
        rows = torch.arange(len(batch.labels), device=batch.labels.device)
        return (rows % 2 == 0)[:, None].expand(batch.labels.shape)
    return batch.packed.segments % NUM_PARTS != 0


def _with_prompts(batch: DeviceBatch) -> torch.Tensor:
    """Labels that include the tokens of prompts, int64 [num_rows, length]."""
    import torch

    from fsdp_shard.data import IGNORE_INDEX

    labels = batch.labels
    following = torch.where(labels != IGNORE_INDEX, labels, batch.inputs["input_ids"].roll(-1, 1))
    if batch.packed is not None:  # a prompt is followed by the chosen answer
        return torch.where(_in_chosen(batch), following, labels)
    positions = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels != IGNORE_INDEX, positions, -1).amax(1, keepdim=True)
    return torch.where(positions <= last, following, IGNORE_INDEX)


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(value)) of a negative `value`."""
    import torch

    # The numerically accurate form on each side of -log 2 (Maechler, 2012).
    return torch.where(
        value < -math.log(2), torch.log1p(-torch.exp(value.clamp(max=-0.5))), torch.log(-torch.expm1(value))
    )
