"""A run of the training loop on a tiny model and few tokens."""

from __future__ import annotations

from typing import Any

from fsdp_shard.data import IGNORE_INDEX, ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding import ShardedModel
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loop import StepReport, TrainingRun, train
from fsdp_shard.training.optim.torch_optim import AdamWConfig
from fsdp_shard.training.trainer_state import TrainerState
from tests.support.tiny import llama
from tests.training.conftest import Plain, stream

SEED, LR = 5, 1e-2
ADAMW = AdamWConfig(lr=LR, weight_decay=0.1)


class Run:
    """A model under training that can be stopped, copied and gone on with."""

    def __init__(
        self, context: DistributedContext, model: ShardedModel | None = None, data: WindowDataset | None = None
    ) -> None:
        self.context = context
        self.model: ShardedModel = model or Plain(llama())
        self.data = data or stream()
        self.dataset = ShuffledDataset(self.data, SEED)
        parameters = dict(self.model.module.named_parameters())
        self.optimizer = ADAMW.build(parameters, {name: tuple(p.shape) for name, p in parameters.items()})
        self.state = TrainerState(SEED, self.data.identity)

    def of(self, config: TrainConfig, **options: Any) -> TrainingRun:
        """What the loop is given."""
        return TrainingRun(self.model, self.optimizer, self.dataset, config, self.context, self.state, **options)

    def go(self, config: TrainConfig, **options: Any) -> list[StepReport]:
        """Train to the end of `config`; what each step reports."""
        return list(train(self.of(config, **options)))


def losses(reports: list[StepReport]) -> list[float]:
    """The loss of each step."""
    return [report.loss for report in reports]


class Uneven(WindowDataset):
    """Windows with 1 to 8 predictions of 8: a mean of means is far from the mean."""

    def sample(self, index: int, epoch: int = 0) -> Any:
        sample = super().sample(index, epoch)
        sample.labels[: (5 * index) % 8] = IGNORE_INDEX
        return sample
