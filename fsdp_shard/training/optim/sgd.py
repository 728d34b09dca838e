"""`optim=sgd`: gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class SgdConfig(OptimConfig):
    """SGD with the momentum of Polyak (1964) or Nesterov (1983), as in torch.optim.SGD; half of AdamW's state."""

    momentum: float = setting(0.9, "Fraction of the previous update added to the next.", above=0.0, maximum=1.0)
    nesterov: bool = setting(False, "Use Nesterov momentum.")

    def create(self, groups: list[dict[str, Any]]) -> Optimizer:
        from torch.optim import SGD

        return SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
