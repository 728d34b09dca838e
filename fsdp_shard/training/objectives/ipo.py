"""`objective=ipo`: identity preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.answer_pairs import PairObjective, Pairs
from fsdp_shard.training.objectives.objective import ReferenceConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class IpoConfig(ReferenceConfig, PairObjective):
    """Identity preference optimization (Azar et al., 2023): (log-ratio chosen - rejected - 1 / (2 beta)) squared.

    Log-ratios are means over the tokens of an answer, as in TRL: sums would depend on its length.
    """

    name: ClassVar[str] = "ipo"

    beta: float = setting(0.1, "How strongly the model is kept near the reference (tau in the paper).", above=0.0)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        chosen, rejected = (pairs.log_ratios / pairs.lengths.clamp(min=1)).unbind(1)
        return (chosen - rejected - 1 / (2 * self.beta)).square()

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.beta * pairs.log_ratios
