"""`optim=muon`: Muon for the matrices inside the layers, AdamW for all else. Imports torch only to build them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.optim.adamw import check_betas
from fsdp_shard.training.optim.param_groups import decay_groups
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class MuonConfig(OptimConfig):
    """Jordan et al., Muon (2024), as torch.optim.Muon has it: updates are the nearest orthogonal matrix.

    That is computed from the whole matrix. The learning rate is AdamW's: the updates are scaled to the size of its.
    """

    needs_whole: ClassVar[bool] = True

    momentum: float = setting(0.95, "Decay rate of the running mean of the gradient.", minimum=0.0, maximum=1.0)
    nesterov: bool = setting(True, "Look ahead by the momentum before the gradient is made orthogonal.")
    num_iterations: int = setting(5, "Newton-Schulz iterations.", minimum=1, maximum=99)
    adjust_lr: str = setting(
        "match_rms_adamw",
        "match_rms_adamw: updates as large as AdamW's, so that its learning rates fit (Liu et al. 2025); original: "
        "as Jordan has it.",
        choices=("match_rms_adamw", "original"),
    )
    weight_decay: float = setting(0.1, "Decay of matrices; norms and biases are not decayed.", minimum=0.0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999], metadata={"help": "AdamW's, for all else."})
    eps: float = setting(1e-8, "AdamW's, for all else.", above=0.0)
    not_muon: list[str] = field(
        default_factory=lambda: ["*embed*", "wte", "wpe", "shared", "lm_head", "classifier", "score"],
        metadata={
            "help": "Matrices of modules with one of these names go to AdamW, a * standing for anything: embeddings "
            "and output heads. What is no matrix always does."
        },
    )

    def check(self, prefix: str) -> None:
        check_betas(self.betas, prefix)

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """See `OptimConfig.build`."""
        from torch.optim import AdamW, Muon, Optimizer

        hidden = {name: param for name, param in parameters.items() if self._is_hidden(name, shapes[name])}
        others = {name: param for name, param in parameters.items() if name not in hidden}
        parts: list[Optimizer] = []
        if groups := decay_groups(hidden, shapes, self.weight_decay):
            parts.append(
                Muon(
                    groups,
                    lr=self.lr,
                    momentum=self.momentum,
                    nesterov=self.nesterov,
                    ns_steps=self.num_iterations,
                    adjust_lr_fn=self.adjust_lr,
                )
            )
        if groups := decay_groups(others, shapes, self.weight_decay):
            betas = (self.betas[0], self.betas[1])
            parts.append(AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, fused=True))
        return _joined(parts)

    def _is_hidden(self, name: str, shape: tuple[int, ...]) -> bool:
        parts = name.split(".")
        return len(shape) == 2 and not any(fnmatch.filter(parts, pattern) for pattern in self.not_muon)


def _joined(parts: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Several optimizers of different parameters as one: its groups and its state are theirs."""
    from torch.optim import Optimizer

    class Joined(Optimizer):
        def __init__(self) -> None:
            super().__init__([group for part in parts for group in part.param_groups], {})
            for part in parts:
                part.state = self.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no closure
            for part in parts:
                part.step()

    return Joined()
