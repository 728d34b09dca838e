"""The `train.*` settings, the part of a run's config that training needs, and the rules for batch sizes.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint import CheckpointConfig, Location
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import Launchable
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.peft.config import AdapterConfig
from fsdp_shard.utils import format_count, prose, refuse_changed, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fsdp_shard.distributed import DistributedContext

_DEFAULT_STEPS = 100
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "constant",
)
# Setting -> the schedules that use it.
_SCHEDULE_SETTINGS = {
    "power": ("polynomial",),
    "num_cycles": ("cosine_with_restarts",),
    "decay_steps": ("warmup_stable_decay",),
    "final_lr_fraction": tuple(name for name in SCHEDULES if name not in ("inverse_sqrt", "constant")),
}
# Name in `trackers` -> whether the tracker has projects.
TRACKERS = {"tensorboard": False, "wandb": True, "mlflow": True, "trackio": True}
_TRACKER_LIST = ", ".join(name if has_projects else f"{name} (into run_dir)" for name, has_projects in TRACKERS.items())


@dataclass
class TrainConfig:
    """Settings of the training loop. A step is one update of the weights, from `global_batch_size` samples."""

    steps: int | None = setting(
        None, f"Number of optimizer steps. Default: {_DEFAULT_STEPS}, unless train.epochs is given.", minimum=1
    )
    epochs: float | None = setting(
        None,
        "Instead of train.steps: passes over the data, such as 3 or 0.5. The number of steps is epochs * samples / "
        "train.global_batch_size, rounded up. Not with data.streaming or data.mixture.",
        above=0.0,
        maximum=1e6,
    )
    global_batch_size: int = setting(8, "Samples per step, over all ranks and micro-batches.", minimum=1)
    micro_batch_size: int = setting(1, "Samples per rank and forward pass.", minimum=1)
    neftune_alpha: float | None = setting(
        None, "Scale of NEFTune's noise on the embeddings in training, such as 5; null: no noise.", above=0.0
    )
    ema_decay: float | None = setting(
        None,
        "Keep an exponential moving average of the trained weights with this decay, such as 0.999, and save it with "
        "each step, in ema/; null: none.",
        above=0.0,
    )
    max_grad_norm: float | None = setting(1.0, "Maximum norm for gradient clipping; null does not clip.", above=0.0)
    schedule: str = setting("cosine", "Learning rate schedule after warm-up.", choices=SCHEDULES)
    power: float = setting(1.0, "Exponent of schedule=polynomial.", above=0.0)
    num_cycles: int = setting(1, "Number of cycles of schedule=cosine_with_restarts.", minimum=1)
    decay_steps: int | None = setting(None, "Decay steps of schedule=warmup_stable_decay; null: a tenth.", minimum=0)
    warmup_steps: int = setting(0, "Steps of linear warm-up from zero to optim.lr.", minimum=0)
    final_lr_fraction: float = setting(0.0, "Final learning rate as a fraction of optim.lr.", minimum=0.0, maximum=1.0)
    eval_every: int = setting(0, "Steps between evaluations; 0: only before the first and after the last.", minimum=0)
    eval_windows: int | None = setting(None, "Maximum number of held-out samples to evaluate; null: all.", minimum=1)
    sample_prompts: list[str] = prose(
        [],
        "Prompts to complete at each evaluation, as data.kind writes them (kind=chat: a user's message): into the log, "
        "samples.jsonl and the trackers, except MLflow, which takes numbers only.",
    )
    sample_tokens: int = setting(64, "Maximum number of tokens in a completion, decoded greedily.", minimum=1)
    patience: int | None = setting(None, "Stop after this many evaluations in a row without improvement.", minimum=1)
    min_delta: float = setting(
        0.0, "With patience: minimum decrease of the held-out loss that counts as an improvement.", minimum=0.0
    )
    non_finite: str = setting(
        "stop",
        "What to do if the loss or a gradient is NaN or infinite. stop: end the run. skip: skip the update and "
        "continue with the next samples.",
        choices=("stop", "skip"),
    )
    max_skips: int = setting(10, "With non_finite=skip: maximum number of consecutive skipped steps.", minimum=1)
    log_every: int = setting(1, "Steps per progress line; metrics.jsonl has every step.", minimum=1)
    plot: bool = setting(False, "Plot the loss curves to loss.png at the end (needs matplotlib).")
    trackers: list[str] = setting(
        [],
        f"Experiment trackers: {_TRACKER_LIST}. Each must be installed and is "
        "configured by its own environment variables, such as WANDB_MODE=offline.",
    )
    tracker_project: str = setting("fsdp-shard", "Project name for the trackers; the run is named after run_dir.")
    profile: list[int] = setting([], "Steps to profile, such as [10,12]: traces and memory of each rank, in profile/.")
    tf32: bool = setting(
        False, "Multiply float32 matrices in TF32 on GPUs: several times faster, with 10 bits of each factor."
    )
    deterministic: bool = setting(False, "Use only deterministic algorithms; others raise an error. Slower on GPUs.")

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict each other or have no effect."""
        num_micro_batches(self, 1, prefix)  # raises unless the global batch can be divided
        if self.ema_decay is not None and self.ema_decay >= 1.0:
            raise ConfigError(f"{prefix}ema_decay={self.ema_decay} would never change the average: give less than 1.0.")
        if self.epochs is None:
            self._check_steps(prefix)
        elif self.steps is not None:
            raise ConfigError(
                f"{prefix}steps={self.steps} and {prefix}epochs={self.epochs:g} both say how long to train; give one "
                f"of them, and null for one that comes from a file, such as {prefix}steps=null."
            )
        elif self.patience is not None and not self.eval_every:
            raise ConfigError(
                f"{prefix}patience={self.patience} needs evaluations during training, but with {prefix}eval_every=0 "
                f"there are none. Set {prefix}eval_every=N."
            )
        if self.patience is None:
            refuse_changed(self, ["min_delta"], prefix, f"has no effect without {prefix}patience.")
        if not self.sample_prompts:
            refuse_changed(self, ["sample_tokens"], prefix, f"has no effect without {prefix}sample_prompts.")
        if "" in map(str.strip, self.sample_prompts):
            raise ConfigError(
                f"{prefix}sample_prompts={list(self.sample_prompts)} has an empty prompt; give some text."
            )
        if self.non_finite != "skip":
            refuse_changed(self, ["max_skips"], prefix, f"has no effect without {prefix}non_finite=skip.")
        if not any(TRACKERS.get(name, True) for name in self.trackers):
            refuse_changed(self, ["tracker_project"], prefix, f"needs {prefix}trackers that have projects; add one.")
        for name, schedules in _SCHEDULE_SETTINGS.items():
            if self.schedule not in schedules:
                why = f"has no effect with {prefix}schedule={self.schedule}; it is for {prefix}schedule="
                refuse_changed(self, [name], prefix, f"{why}{' or '.join(schedules)}.")

    def _check_steps(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict the number of steps."""
        last = self.num_steps
        steps = f"{prefix}steps={last}"
        if self.epochs is not None:
            steps = f"{prefix}epochs={self.epochs:g}, which is {format_count(last, 'step')}"
        if self.patience is not None and not 0 < self.eval_every < last:
            raise ConfigError(
                f"{prefix}patience={self.patience} needs evaluations during training, but with {prefix}eval_every="
                f"{self.eval_every} there are none before the last of {format_count(last, 'step')}. Set "
                f"{prefix}eval_every=N to less than that."
            )
        if outside := [step for step in self.profile if not 1 <= step <= last]:
            raise ConfigError(
                f"{prefix}profile={list(self.profile)} names step {outside[0]}, but steps go from 1 to {steps}."
            )
        if self.warmup_steps >= max(last, 1):  # the rate is 0 in the first step, and highest after warm-up
            raise ConfigError(
                f"{prefix}warmup_steps={self.warmup_steps} is not less than {steps}, so the learning rate would never "
                f"reach optim.lr. Set it to at most {max(last - 1, 0)}."
            )
        if num_decay_steps(self) > last - self.warmup_steps:
            left = format_count(last - self.warmup_steps, "step")
            raise ConfigError(
                f"{prefix}decay_steps={num_decay_steps(self)} is more than the {left} that {prefix}warmup_steps="
                f"{self.warmup_steps} leaves of {steps}."
            )

    @property
    def num_steps(self) -> int:
        """Number of steps of the run. With `epochs`, it is known only in the settings that `for_data` returns."""
        if self.steps is None and self.epochs is not None:
            raise ValueError("the steps of train.epochs depend on the data: use the settings that for_data returns")
        return _DEFAULT_STEPS if self.steps is None else self.steps

    def for_data(self, samples_per_epoch: int | None, step: int = 0, num_samples: int = 0) -> TrainConfig:
        """Return these settings with `epochs` converted to a number of steps.

        Args:
            samples_per_epoch: Number of samples in an epoch; None if the data has no such number.
            step: Number of finished steps, possibly with another batch size.
            num_samples: Number of samples in the finished steps.

        Raises:
            ConfigError: The data has no epochs, or other settings contradict the number of steps.
        """
        if self.epochs is None:
            return self
        if samples_per_epoch is None:
            raise ConfigError(
                f"train.epochs={self.epochs:g} needs data with a known number of samples; set train.steps instead."
            )
        # As the decimal number that was written: in floating point, 1.1 * 10 is more than 11.
        left = Fraction(str(self.epochs)) * samples_per_epoch - num_samples
        known = replace(self, steps=step + max(0, math.ceil(left / self.global_batch_size)))
        known._check_steps("train.")
        return known


class ModelSettings(Protocol):
    """The model of a config, and what it is trained for."""

    model: ModelConfig
    objective: ObjectiveConfig

    @property
    def source(self) -> Location:
        """The location that `model.path` leads to."""


class CombinedSettings(Protocol):
    """The sections of a training run's config that restrict each other."""

    @property
    def model(self) -> ModelConfig:
        """The model."""

    @property
    def shard(self) -> ShardConfig:
        """How it is sharded."""

    @property
    def train(self) -> TrainConfig:
        """The steps."""

    @property
    def optim(self) -> OptimConfig:
        """The optimizer."""

    @property
    def adapter(self) -> AdapterConfig:
        """The trained part of the model."""

    @property
    def objective(self) -> ObjectiveConfig:
        """The objective."""


class FinetuneSettings(ModelSettings, Launchable, Protocol):
    """The part of a training run's config that training uses."""

    resume: str
    seed: int
    loss: str | None
    data: DataConfig
    shard: ShardConfig
    adapter: AdapterConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: CheckpointConfig

    def to_yaml(self) -> str:
        """All settings, without secrets."""

    def load_dispatched(
        self, source: Location, max_memory: Any, context: DistributedContext, log: Callable[[str], object], dtype: str
    ) -> PreTrainedModel:
        """Load a model that is not trained, on each rank, over GPU, CPU and disk within the budgets `max_memory`.

        The config implements this, as training cannot. `log` receives a line about the model's placement. `dtype` may
        be `keep`.
        """


def num_decay_steps(config: TrainConfig) -> int:
    """Number of decay steps at the end of schedule=warmup_stable_decay; 0 for other schedules."""
    if config.schedule != "warmup_stable_decay":
        return 0
    tenth = min(-(-config.num_steps // 10), config.num_steps - config.warmup_steps)
    return tenth if config.decay_steps is None else config.decay_steps


def num_micro_batches(config: TrainConfig, num_ranks: int, prefix: str = "train.") -> int:
    """Return the number of micro-batches per rank and step.

    Args:
        config: The batch sizes.
        num_ranks: Number of data-parallel ranks.
        prefix: Prefix of the settings in messages.

    Raises:
        ConfigError: The global batch cannot be divided into micro-batches over the ranks.
    """
    size, unit = config.global_batch_size, config.micro_batch_size * num_ranks
    below, above = size // unit * unit, (size // unit + 1) * unit
    if size != below:
        ranks = f" x {num_ranks} data-parallel ranks = {unit}" if num_ranks > 1 else ""
        fitting = f"{prefix}global_batch_size={below} or {above} would fit"
        raise ConfigError(
            f"{prefix}global_batch_size={size} is not divisible by {prefix}micro_batch_size="
            f"{config.micro_batch_size}{ranks}; {fitting if below else f'the least that fits is {above}'}."
        )
    return size // unit


def check_held_out(config: TrainConfig, data: DataConfig) -> None:
    """Raise ConfigError if a setting requires evaluations but there is no held-out data."""
    if data.eval_sets and config.eval_windows is not None and config.eval_windows < len(data.eval_sets):
        raise ConfigError(
            f"train.eval_windows={config.eval_windows} leaves no window for some of the {len(data.eval_sets)} sets of "
            f"data.eval_sets; give at least {len(data.eval_sets)}."
        )
    if data.eval_path is not None or data.eval_sets or data.eval_fraction:
        return
    names = ["patience", *([] if config.sample_prompts else ["eval_every"]), "eval_windows"]
    for name in names:
        if value := getattr(config, name):
            raise ConfigError(
                f"train.{name}={value} needs held-out text to evaluate on; set data.eval_path, data.eval_sets or "
                f"data.eval_fraction."
            )
