"""Figures of a reward model, from the rewards of each pair's chosen and rejected answers."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp_shard.evaluation.significance import Floats


@dataclass(frozen=True)
class RewardFigures:
    """The figures.

    Attributes:
        rewards: Rewards of each pair's answers, the chosen one first [num_pairs, 2].
        data_margins: The margins in the data [num_pairs]; None if there are none.
    """

    rewards: Floats
    data_margins: Floats | None = None

    @property
    def margins(self) -> Floats:
        """The reward of the chosen answer minus that of the rejected one [num_pairs]."""
        return np.asarray(self.rewards[:, 0] - self.rewards[:, 1])

    @property
    def correct(self) -> Floats:
        """1 for each pair whose chosen answer has the higher reward; 0 otherwise and for equal rewards [num_pairs]."""
        return np.asarray(self.margins > 0, np.float64)

    @cached_property
    def losses(self) -> Floats:
        """The loss of each pair in nats, as in objective=reward without `center` [num_pairs].

        It is -log sigmoid(margin - margin of the data) (Bradley-Terry; Ouyang et al., 2022).
        """
        beyond = self.margins if self.data_margins is None else self.margins - self.data_margins
        return np.logaddexp(0.0, -beyond)

    @property
    def row(self) -> dict[str, float | int]:
        """All figures except intervals, for result.json."""
        means = {
            "accuracy": self.correct,
            "mean_margin": self.margins,
            "mean_reward_chosen": self.rewards[:, 0],
            "mean_reward_rejected": self.rewards[:, 1],
            "preference_loss": self.losses,
        }
        found: dict[str, float | int] = {
            name: math.fsum(values.tolist()) / len(values) for name, values in means.items()
        }
        return found | {"num_pairs": len(self.rewards), "num_ties": int(np.count_nonzero(self.margins == 0))}
