"""The settings of `train.*`, the base of `optim.*`, and the rule that ties the batch size to the number of ranks.

Imports no torch. An optimizer is one more file with one more subclass of `OptimConfig`; nothing here lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "constant",
)
# Setting -> its default, and the schedules that look at it.
_OF_SCHEDULES: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "power": (1.0, ("polynomial",)),
    "num_cycles": (1, ("cosine_with_restarts",)),
    "decay_steps": (None, ("warmup_stable_decay",)),
    "final_lr_fraction": (0.0, tuple(name for name in SCHEDULES if name not in ("inverse_sqrt", "constant"))),
}


@dataclass
class TrainConfig:
    """Settings of the training loop. A step is one update of the weights, from `global_batch_size` windows."""

    steps: int = setting(100, "Updates of the weights to make.", minimum=1)
    global_batch_size: int = setting(8, "Windows in each step, over all ranks and micro-batches.", minimum=1)
    micro_batch_size: int = setting(1, "Windows that one rank runs through the model at once.", minimum=1)
    max_grad_norm: float | None = setting(
        1.0, "Gradients with a larger norm are scaled down to it; null only measures the norm.", above=0.0
    )
    schedule: str = setting("cosine", "How the learning rate falls after warm-up.", choices=SCHEDULES)
    power: float = setting(1.0, "Exponent of the fall, for schedule=polynomial.", above=0.0)
    num_cycles: int = setting(1, "Times that the learning rate falls, for schedule=cosine_with_restarts.", minimum=1)
    decay_steps: int | None = setting(
        None, "Steps of the fall at the end, for schedule=warmup_stable_decay; null: a tenth of all.", minimum=0
    )
    warmup_steps: int = setting(0, "Steps over which the learning rate rises from zero to optim.lr.", minimum=0)
    final_lr_fraction: float = setting(
        0.0, "Part of optim.lr that is left after the last step.", minimum=0.0, maximum=1.0
    )
    eval_every: int = setting(
        0,
        "Steps between evaluations on held-out text; 0 evaluates before the first and after the last only.",
        minimum=0,
    )
    eval_windows: int | None = setting(None, "Evaluate on at most this many held-out windows; null: all.", minimum=1)
    patience: int | None = setting(
        None, "Stop early after this many evaluations in a row without a lower held-out loss; null: never.", minimum=1
    )
    min_delta: float = setting(
        0.0, "With patience: how far the held-out loss must fall for an evaluation to count as lower.", minimum=0.0
    )
    non_finite: str = setting(
        "stop",
        "A step whose loss or gradients are NaN or infinite. stop: end the run there. skip: leave weights and "
        "optimizer as they are and go on with the next samples.",
        choices=("stop", "skip"),
    )
    max_skips: int = setting(10, "With non_finite=skip: end the run when more steps in a row are skipped.", minimum=1)
    log_every: int = setting(1, "Steps that a progress line sums up; metrics.jsonl always has every step.", minimum=1)
    plot: bool = setting(False, "Draw the loss curves to loss.png at the end (needs matplotlib).")
    trackers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Where else figures go: tensorboard (into run_dir), wandb, mlflow, trackio. Each must be "
            "installed; they read their own environment variables, such as WANDB_MODE=offline."
        },
    )
    tracker_project: str = setting("fsdp-shard", "What trackers file the run under; its name is that of run_dir.")
    profile: list[int] = field(
        default_factory=list,
        metadata={"help": "Steps to profile, such as [10,12]: a trace and the use of memory of each rank in profile/."},
    )
    deterministic: bool = setting(
        False, "Use only operations that give the same bits each time; an error where torch has none. Slower on a GPU."
    )

    def check(self, prefix: str) -> None:
        """Refuse what can work on no number of ranks."""
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"{prefix}global_batch_size={self.global_batch_size} is not divisible by {prefix}micro_batch_size="
                f"{self.micro_batch_size}; {_what_fits(self.global_batch_size, self.micro_batch_size, prefix)}."
            )
        if self.patience is not None and not 0 < self.eval_every < self.steps:
            raise ConfigError(
                f"{prefix}patience={self.patience} waits for evaluations, but {prefix}eval_every="
                f"{self.eval_every} makes none before the last of {self.steps} steps. Give {prefix}eval_every=N, less "
                f"than {prefix}steps."
            )
        if self.min_delta and self.patience is None:
            raise ConfigError(
                f"{prefix}min_delta={self.min_delta} would do nothing without {prefix}patience; give both or neither."
            )
        if outside := [step for step in self.profile if not 1 <= step <= self.steps]:
            raise ConfigError(
                f"{prefix}profile={list(self.profile)} names step {outside[0]}, but steps go from 1 to {prefix}steps="
                f"{self.steps}."
            )
        if self.max_skips != 10 and self.non_finite != "skip":
            raise ConfigError(f"{prefix}max_skips={self.max_skips} would do nothing without {prefix}non_finite=skip.")
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"{prefix}warmup_steps={self.warmup_steps} is more than {prefix}steps={self.steps}; the learning rate "
                f"would never reach optim.lr. Give at most {self.steps}."
            )
        self._check_schedule(prefix)

    def _check_schedule(self, prefix: str) -> None:
        """Refuse what the chosen schedule would not look at, and a fall that does not fit."""
        for name, (default, schedules) in _OF_SCHEDULES.items():
            if getattr(self, name) != default and self.schedule not in schedules:
                raise ConfigError(
                    f"{prefix}{name}={getattr(self, name)} has no effect with {prefix}schedule={self.schedule}; it is "
                    f"for {prefix}schedule={' or '.join(schedules)}."
                )
        if num_decay_steps(self) > self.steps - self.warmup_steps:
            raise ConfigError(
                f"{prefix}decay_steps={num_decay_steps(self)} is more than the {self.steps - self.warmup_steps} steps "
                f"that {prefix}warmup_steps={self.warmup_steps} leaves of {prefix}steps={self.steps}."
            )


def num_decay_steps(config: TrainConfig) -> int:
    """Steps of the fall at the end of schedule=warmup_stable_decay; 0 with others."""
    if config.schedule != "warmup_stable_decay":
        return 0
    tenth = min(-(-config.steps // 10), config.steps - config.warmup_steps)
    return tenth if config.decay_steps is None else config.decay_steps


def check_batch(config: TrainConfig, num_ranks: int, prefix: str = "train.") -> int:
    """The micro-batches of each rank; ConfigError unless `num_ranks` data-parallel ranks share each global batch in
    whole ones.
    """
    unit = config.micro_batch_size * num_ranks
    if config.global_batch_size % unit:
        raise ConfigError(
            f"{prefix}global_batch_size={config.global_batch_size} is not divisible by {prefix}micro_batch_size="
            f"{config.micro_batch_size} x {num_ranks} data-parallel ranks = {unit}; "
            f"{_what_fits(config.global_batch_size, unit, prefix)}."
        )
    return config.global_batch_size // unit


def check_held_out(config: TrainConfig, data: DataConfig, prefix: str = "train.") -> None:
    """Raise ConfigError when a setting asks for evaluations and there is no text to make them on."""
    if data.eval_path is not None or data.eval_fraction:
        return
    for name in ("patience", "eval_every", "eval_windows"):
        if value := getattr(config, name):
            raise ConfigError(
                f"{prefix}{name}={value} needs held-out text to evaluate on; give data.eval_path or data.eval_fraction."
            )


def _what_fits(size: int, unit: int, prefix: str) -> str:
    below, above = size // unit * unit, (size // unit + 1) * unit
    return f"{prefix}global_batch_size={below} or {above} would fit" if below else f"the least that fits is {above}"


@dataclass
class OptimConfig:
    """What every optimizer has. Subclasses add their own settings and build torch's object."""

    # Whether an update of a parameter needs all of it: then each is updated by one rank, which has it whole for that
    # moment and keeps its state (`whole.py`). Otherwise each rank updates the elements that it holds.
    needs_whole: ClassVar[bool] = False

    lr: float = setting(2e-5, "Highest learning rate, reached after warm-up.", above=0.0)

    def check_installed(self) -> None:
        """Raise ConfigError when a package that this optimizer comes from is not installed."""

    def build(
        self, parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> torch.optim.Optimizer:
        """The optimizer of the trainable ones among `parameters`, given by FQN.

        `shapes` holds each one's logical shape: a wrapper may keep its local part of a matrix as a flat vector.
        """
        raise AssertionError("an optimizer's config class implements this")
