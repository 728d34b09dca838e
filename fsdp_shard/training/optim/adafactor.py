"""`optim=adafactor`: Adafactor, whose state of a matrix is one row and one column. Imports torch only to build it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.optim.param_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class AdafactorConfig(OptimConfig):
    """Shazeer & Stern, Adafactor (2018), as torch.optim.Adafactor has it.

    The means and norms that it takes are of the whole parameter, not of the part that a rank holds.
    """

    needs_whole: ClassVar[bool] = True

    lr: float = setting(1e-2, "Highest learning rate, relative to the size of each parameter.", above=0.0)
    beta2_decay: float = setting(-0.8, "The mean of the squared gradient forgets by 1 - step^beta2_decay.", maximum=0.0)
    clip_threshold: float = setting(1.0, "Root mean square of an update, at most (torch's d).", minimum=1.0)
    min_scale: float = setting(1e-3, "The size of a parameter counts as at least this (torch's eps[1]).", above=0.0)
    weight_decay: float = setting(0.0, "Decay of matrices; norms and biases are not decayed.", minimum=0.0)

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """See `OptimConfig.build`."""
        from torch.optim import Adafactor

        groups = decay_groups(parameters, shapes, self.weight_decay)
        eps = (None, self.min_scale)
        return Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay, d=self.clip_threshold, eps=eps)
