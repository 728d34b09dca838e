"""The learning rate as a function of the step alone, so that nothing of it has to be saved. Pure, without torch.

The curves are those of transformers' `get_scheduler` for linear, cosine_with_min_lr and constant_with_warmup, the
cosine after Loshchilov & Hutter, SGDR (2017); the tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp_shard.training.base import TrainConfig


def learning_rate(config: TrainConfig, peak: float, step: int) -> float:
    """The learning rate of the update that follows `step` finished ones, with `peak` reached after warm-up."""
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    fall = _FALLS[config.schedule](min(1.0, progress))
    return peak * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * fall)


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether what happens every `every` steps (0: never) and after the last one happens after `step`."""
    return step == num_steps or (every > 0 and step % every == 0)


# From 1 to 0 as progress goes from 0 to 1.
_FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
}
