"""`objective=simpo`: simple preference optimization, without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.answer_pairs import PairObjective, Pairs, check_smoothing, smoothed_losses
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class SimpoConfig(PairObjective):
    """Simple preference optimization (Meng et al., 2024): -log sigmoid(beta * (mean chosen - mean rejected) - margin).

    The rewards are mean log-probabilities per token, times beta; there is no reference.
    """

    name: ClassVar[str] = "simpo"

    beta: float = setting(2.0, "Scale of the rewards.", above=0.0)
    gamma: float = setting(1.0, "Margin by which the chosen answer's reward should exceed the other's.", minimum=0.0)
    label_smoothing: float = setting(0.0, "Assumed fraction of wrong preferences.", minimum=0.0)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for label smoothing that leaves nothing to learn."""
        check_smoothing(self.label_smoothing, prefix)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        chosen, rejected = self.rewards(pairs).unbind(1)
        return smoothed_losses(chosen - rejected - self.gamma, self.label_smoothing)

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.beta * pairs.means
