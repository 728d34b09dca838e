"""The learning rate, with warm-up, as a function of only the step, so checkpoints need not store it. Pure Python.

The schedules are those of transformers' `get_scheduler`, each with a floor (`train.final_lr_fraction`); the cosine and
its restarts after Loshchilov & Hutter, SGDR (2017). To add a schedule, add its decay to `_DECAYS`, its name to
`SCHEDULES` in `training/config.py`, and there the settings that only it has.
"""

import math
from collections.abc import Callable

from fsdp_shard.training.config import SCHEDULES, TrainConfig, num_decay_steps


def learning_rate(config: TrainConfig, peak: float, step: int) -> float:
    """Return the learning rate of the update after `step` finished steps, which reaches `peak` after warm-up."""
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    decay = _DECAYS[config.schedule](config, step - config.warmup_steps)
    return peak * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * decay)


def _progress(config: TrainConfig, since_warmup: int) -> float:
    """The progress from 0 at the end of warm-up to 1 after the last step."""
    return min(1.0, since_warmup / max(1, config.num_steps - config.warmup_steps))


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine_with_restarts(config: TrainConfig, since_warmup: int) -> float:
    progress = _progress(config, since_warmup)
    return 0.0 if progress >= 1.0 else _cosine(config.num_cycles * progress % 1.0)


def _inverse_sqrt(config: TrainConfig, since_warmup: int) -> float:
    timescale = config.warmup_steps or 10_000
    return 1.0 / math.sqrt((since_warmup + timescale) / timescale)


def _stable_then_decay(config: TrainConfig, since_warmup: int) -> float:
    """Hu et al., MiniCPM (2024)."""
    num_decay = num_decay_steps(config)
    num_stable = config.num_steps - config.warmup_steps - num_decay
    return _cosine(min(1.0, max(0, since_warmup - num_stable) / max(1, num_decay)))


# Fraction of the learning rate above the floor, as a function of the steps since warm-up; 1 at first.
_DECAYS: dict[str, Callable[[TrainConfig, int], float]] = {
    "linear": lambda config, since: 1.0 - _progress(config, since),
    "cosine": lambda config, since: _cosine(_progress(config, since)),
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": lambda config, since: (1.0 - _progress(config, since)) ** config.power,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable_then_decay,
    "constant": lambda config, since: 1.0,
}
assert _DECAYS.keys() == set(SCHEDULES)
