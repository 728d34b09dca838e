"""The settings of `train.*`, the base of `optim.*`, and the rule that ties the batch size to the number of ranks.

Imports no torch. An optimizer is one more file with one more subclass of `OptimConfig`; nothing here lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError
from fsdp_shard.settings import setting

if TYPE_CHECKING:
    import torch


@dataclass
class TrainConfig:
    """Settings of the training loop. A step is one update of the weights, from `global_batch_size` windows."""

    steps: int = setting(100, "Updates of the weights to make.", minimum=1)
    global_batch_size: int = setting(8, "Windows in each step, over all ranks and micro-batches.", minimum=1)
    micro_batch_size: int = setting(1, "Windows that one rank runs through the model at once.", minimum=1)
    max_grad_norm: float | None = setting(
        1.0, "Gradients with a larger norm are scaled down to it; null only measures the norm.", above=0.0
    )
    schedule: str = setting(
        "cosine", "How the learning rate falls after warm-up.", choices=("linear", "cosine", "constant")
    )
    warmup_steps: int = setting(0, "Steps over which the learning rate rises from zero to optim.lr.", minimum=0)
    final_lr_fraction: float = setting(
        0.0, "Part of optim.lr that is left after the last step (linear, cosine).", minimum=0.0, maximum=1.0
    )
    eval_every: int = setting(
        0,
        "Steps between evaluations on held-out text; 0 evaluates before the first and after the last only.",
        minimum=0,
    )
    eval_windows: int | None = setting(None, "Evaluate on at most this many held-out windows; null: all.", minimum=1)
    log_every: int = setting(1, "Steps between progress lines; metrics.jsonl always has every step.", minimum=1)
    plot: bool = setting(False, "Draw the loss curves to loss.png at the end (needs matplotlib).")

    def check(self, prefix: str) -> None:
        """Refuse what can work on no number of ranks."""
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"{prefix}global_batch_size={self.global_batch_size} is not divisible by {prefix}micro_batch_size="
                f"{self.micro_batch_size}; {_what_fits(self.global_batch_size, self.micro_batch_size, prefix)}."
            )
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"{prefix}warmup_steps={self.warmup_steps} is more than {prefix}steps={self.steps}; the learning rate "
                f"would never reach optim.lr. Give at most {self.steps}."
            )


def check_batch(config: TrainConfig, num_ranks: int, prefix: str = "train.") -> None:
    """Raise ConfigError unless `num_ranks` data-parallel ranks share each global batch in whole micro-batches."""
    unit = config.micro_batch_size * num_ranks
    if config.global_batch_size % unit:
        raise ConfigError(
            f"{prefix}global_batch_size={config.global_batch_size} is not divisible by {prefix}micro_batch_size="
            f"{config.micro_batch_size} x {num_ranks} data-parallel ranks = {unit}; "
            f"{_what_fits(config.global_batch_size, unit, prefix)}."
        )


def _what_fits(size: int, unit: int, prefix: str) -> str:
    below, above = size // unit * unit, (size // unit + 1) * unit
    return f"{prefix}global_batch_size={below} or {above} would fit" if below else f"the least that fits is {above}"


@dataclass
class OptimConfig:
    """What every optimizer has. Subclasses add their own settings and build torch's object."""

    lr: float = setting(2e-5, "Highest learning rate, reached after warm-up.", above=0.0)

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """The optimizer of the trainable ones among `parameters`, given by FQN.

        `shapes` holds each one's logical shape: a wrapper may keep its local part of a matrix as a flat vector.
        """
        raise AssertionError("an optimizer's config class implements this")
