"""The torch.optim optimizers that need only their settings: `optim=adamw|sgd|adafactor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.optim.config import OptimConfig, decay_setting
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdamConfig(OptimConfig):
    """Settings common to AdamW and the optimizers derived from it."""

    weight_decay: float = decay_setting(0.01)
    betas: list[float] = setting(
        [0.9, 0.999], "Decay rates of AdamW's running averages of the gradient and of its square."
    )
    eps: float = setting(1e-8, "Term added to AdamW's denominator for numerical stability.", above=0.0)

    def check(self, prefix: str) -> None:
        """Raise ConfigError unless `betas` are two numbers in [0, 1)."""
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"{prefix}betas={list(self.betas)} must be two numbers from 0 up to, not including, 1.")


@dataclass
class AdamWConfig(AdamConfig):
    """AdamW (Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019), as in torch.optim.AdamW."""

    fused: bool = setting(True, "Update each parameter in one fused kernel.")

    def create(self, groups: list[dict[str, Any]]) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=self.fused)


@dataclass
class SgdConfig(OptimConfig):
    """SGD with the momentum of Polyak (1964) or Nesterov (1983), as in torch.optim.SGD.

    It has half of AdamW's state, and none without momentum.
    """

    momentum: float = setting(
        0.9, "Fraction of the previous update added to the next; 0 keeps no state.", minimum=0.0, maximum=1.0
    )
    nesterov: bool = setting(False, "Use Nesterov momentum.")

    @property
    def keeps_state(self) -> bool:
        """Whether there is momentum."""
        return self.momentum > 0.0

    def check(self, prefix: str) -> None:
        """Raise ConfigError for Nesterov momentum of zero."""
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError(f"{prefix}nesterov=true needs momentum, but {prefix}momentum=0; change one of them.")

    def create(self, groups: list[dict[str, Any]]) -> Optimizer:
        from torch.optim import SGD

        return SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


@dataclass
class AdafactorConfig(OptimConfig):
    """Adafactor (Shazeer & Stern, 2018), as in torch.optim.Adafactor: a matrix's state is one row and one column.

    Means and norms are over the unsharded parameter, not over a rank's shard.
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
