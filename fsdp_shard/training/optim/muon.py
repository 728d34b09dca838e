"""`optim=muon`: Muon for the hidden matrices, AdamW for embeddings, output heads, norms and biases."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.optim.config import decay_setting
from fsdp_shard.training.optim.parameter_groups import decay_groups
from fsdp_shard.training.optim.torch_optim import AdamConfig, AdamWConfig
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch


@dataclass
class MuonConfig(AdamConfig):
    """Muon (Jordan et al., 2024), as in torch.optim.Muon: each update is orthogonalized.

    Orthogonalization needs the unsharded matrix. `betas` and `eps` are those of AdamW.
    """

    needs_full_params: ClassVar[bool] = True

    weight_decay: float = decay_setting(0.1)
    momentum: float = setting(0.95, "Decay rate of the running average of the gradient.", minimum=0.0, maximum=1.0)
    nesterov: bool = setting(True, "Use Nesterov momentum.")
    num_iterations: int = setting(5, "Number of Newton-Schulz iterations.", minimum=1, maximum=99)
    adjust_lr: str = setting(
        "match_rms_adamw",
        "match_rms_adamw: scale updates to the RMS of AdamW's, so that its learning rates fit (Liu et al. 2025); "
        "original: the scale of Jordan et al.",
        choices=("match_rms_adamw", "original"),
    )
    not_muon: list[str] = setting(
        ["*embed*", "wte", "wpe", "shared", "lm_head", "classifier", "score", "relative_attention_bias"],
        "Names of modules whose matrices AdamW updates, with * as a wildcard: embeddings and output heads. Parameters "
        "that are not matrices always go to AdamW.",
    )

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a user's pattern in `not_muon` matches nothing: Muon would update what it names."""
        parts, known = {part for name in names for part in name.split(".")}, type(self)().not_muon
        for pattern in self.not_muon:
            if pattern not in known and not fnmatch.filter(parts, pattern):
                raise ConfigError(
                    f"optim.not_muon has {pattern}, and no module of the model has such a name; correct or "
                    f"remove it. The default is [{','.join(known)}], which a list of yours replaces."
                )

    def build(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        rates: Mapping[str, float] | None = None,
    ) -> torch.optim.Optimizer:
        from torch.optim import Muon, Optimizer

        hidden = {name: param for name, param in parameters.items() if self._is_hidden(name, shapes[name])}
        others = {name: param for name, param in parameters.items() if name not in hidden}
        optimizers: list[Optimizer] = []
        if groups := decay_groups(hidden, shapes, self.weight_decay, rates):
            options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov}
            options |= {"ns_steps": self.num_iterations, "adjust_lr_fn": self.adjust_lr}
            optimizers.append(Muon(groups, lr=self.lr, **options))
        if groups := decay_groups(others, shapes, self.weight_decay, rates):
            optimizers.append(AdamWConfig(lr=self.lr, betas=self.betas, eps=self.eps).create(groups))

        class Combined(Optimizer):
            """Combines the optimizers into one, with their parameter groups and a common state."""

            def __init__(self) -> None:
                super().__init__([group for part in optimizers for group in part.param_groups], {})
                for part in optimizers:
                    part.state = self.state

            def step(self) -> None:  # type: ignore[override]  # it takes no closure
                for part in optimizers:
                    part.step()

        return Combined()

    def _is_hidden(self, name: str, shape: tuple[int, ...]) -> bool:
        parts = name.split(".")
        is_matrix = len(shape) == 2 and not parts[-1].endswith("bias")  # expert matrices are stacked
        return is_matrix and not any(fnmatch.filter(parts, pattern) for pattern in self.not_muon)
