"""`optim=adafactor`: Adafactor, whose state of a matrix is one row and one column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdafactorConfig(OptimConfig):
    """Adafactor (Shazeer & Stern, 2018), as in torch.optim.Adafactor.

    Its means and norms are of the unsharded parameter, not of the shard of a rank.
    """

    needs_full_params: ClassVar[bool] = True

    lr: float = setting(1e-2, "Peak learning rate, relative to the scale of each parameter.", above=0.0)
    beta2_decay: float = setting(
        -0.8, "Exponent of the decay rate of the squared gradient: 1 - step^beta2_decay.", maximum=0.0
    )
    clip_threshold: float = setting(1.0, "Maximum root mean square of an update (torch's d).", minimum=1.0)
    min_scale: float = setting(1e-3, "Lower bound of a parameter's scale (torch's eps[1]).", above=0.0)

    def create(self, groups: list[dict[str, Any]]) -> Optimizer:
        from torch.optim import Adafactor

        eps = (None, self.min_scale)
        return Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay, d=self.clip_threshold, eps=eps)
