"""`objective=dpo`: direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.objectives.answer_pairs import PairObjective, Pairs
from fsdp_shard.training.objectives.objective import ReferenceConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class DpoConfig(ReferenceConfig, PairObjective):
    """Direct preference optimization (Rafailov et al., 2023): -log sigmoid(beta * (log-ratio chosen - rejected)).

    With `label_smoothing` it is the conservative form (Mitchell, 2023): that fraction of the preferences is wrong.
    """

    name: ClassVar[str] = "dpo"

    beta: float = setting(0.1, "How strongly the model is kept near the reference.", above=0.0)
    label_smoothing: float = setting(0.0, "Fraction of the preferences that is taken to be wrong.", minimum=0.0)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a smoothing that leaves nothing to learn."""
        check_smoothing(self.label_smoothing, prefix)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        import torch.nn.functional as F

        chosen, rejected = pairs.log_ratios.unbind(1)
        logits = self.beta * (chosen - rejected)
        smoothing = self.label_smoothing
        return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.beta * pairs.log_ratios


def check_smoothing(value: float, prefix: str) -> None:
    """Raise ConfigError unless a smoothing leaves more right preferences than wrong ones."""
    from fsdp_shard.errors import ConfigError

    if value >= 0.5:
        raise ConfigError(
            f"{prefix}label_smoothing={value} is out of range: it must be less than 0.5, or nothing is preferred."
        )
