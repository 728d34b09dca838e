"""`optim=sgd`: gradient descent with momentum. Imports torch only when it builds the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.optim.param_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class SgdConfig(OptimConfig):
    """Momentum after Polyak (1964), or Nesterov (1983), as torch.optim.SGD has it; half of AdamW's state."""

    momentum: float = setting(0.9, "Part of the last update that goes into the next one.", above=0.0, maximum=1.0)
    nesterov: bool = setting(False, "Look ahead by the momentum before the gradient is added.")
    weight_decay: float = setting(0.0, "Decay of matrices; norms and biases are not decayed.", minimum=0.0)

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """See `OptimConfig.build`."""
        from torch.optim import SGD

        groups = decay_groups(parameters, shapes, self.weight_decay)
        return SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
