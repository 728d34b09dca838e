"""`optim=adamw`: AdamW, with weight decay on matrices only. Imports torch only when it builds the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.optim.param_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class AdamWConfig(OptimConfig):
    """Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019), as torch.optim.AdamW has it."""

    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={"help": "Decay rates of the running means of the gradient and of its square."},
    )
    eps: float = setting(1e-8, "Added to the denominator of the update.", above=0.0)
    weight_decay: float = setting(0.01, "Decay of matrices; norms and biases are not decayed.", minimum=0.0)
    fused: bool = setting(True, "Update each parameter in one pass over memory.")

    def check(self, prefix: str) -> None:
        """Refuse betas that are not two numbers in [0, 1)."""
        check_betas(self.betas, prefix)

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """See `OptimConfig.build`; two groups, the decayed and the others."""
        from torch.optim import AdamW

        groups = decay_groups(parameters, shapes, self.weight_decay)
        return AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=self.fused)


def check_betas(betas: list[float], prefix: str) -> None:
    """Raise ConfigError unless `betas` are two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"{prefix}betas={list(betas)} must be two numbers from 0 up to, not including, 1.")
