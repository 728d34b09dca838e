"""`objective=dpo`: direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.answer_pairs import PairObjective, Pairs, check_smoothing, smoothed_losses
from fsdp_shard.training.objectives.objective import ReferenceConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class DpoConfig(ReferenceConfig, PairObjective):
    """Direct preference optimization (Rafailov et al., 2023): -log sigmoid(beta * (log-ratio chosen - rejected)).

    `label_smoothing` gives the conservative form (Mitchell, 2023), which assumes that this fraction of the preferences
    is wrong.
    """

    name: ClassVar[str] = "dpo"

    beta: float = setting(0.1, "How strongly the model is kept near the reference.", above=0.0)
    label_smoothing: float = setting(0.0, "Assumed fraction of wrong preferences.", minimum=0.0)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for label smoothing that leaves nothing to learn."""
        check_smoothing(self.label_smoothing, prefix)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        chosen, rejected = pairs.log_ratios.unbind(1)
        return smoothed_losses(self.beta * (chosen - rejected), self.label_smoothing)

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.beta * pairs.log_ratios
