"""`optim=adamw`: AdamW, with weight decay on matrices only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.optim.config import OptimConfig, decay_setting
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdamConfig(OptimConfig):
    """Settings that AdamW and the optimizers derived from it share."""

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
