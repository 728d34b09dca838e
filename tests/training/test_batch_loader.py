"""What a step needs is loaded while the step before it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from fsdp_shard.data import Batch, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loop import train
from tests.training.conftest import stream
from tests.training.test_loop import Run, losses

CONFIG = TrainConfig(steps=3, global_batch_size=4, micro_batch_size=2)


@dataclass(frozen=True)
class Watched(WindowDataset):
    """Keeps what it was asked for, and by which thread; `pause` delays each batch."""

    asked: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    pause: float = 0.0

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        self.asked.append(first)
        return super().order(seed, first, count)

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.pause)
        return super().batch(indices)


def watched(pause: float = 0.0) -> Watched:
    data = stream()
    return Watched(data.tokens, data.sequence_length, data.name, pause=pause)


def test_the_samples_of_the_next_step_are_loaded_in_a_thread(alone: DistributedContext) -> None:
    data = watched()
    run, asked = Run(alone, data=data), []
    for report in train(run.of(CONFIG)):
        asked.append(list(data.asked))
        assert report.data_seconds >= 0
    assert asked == [[0, 4], [0, 4, 8], [0, 4, 8]], "one step ahead, and none after the last"
    assert len(data.threads) == 1
    assert threading.main_thread().name not in data.threads
    assert not [thread for thread in threading.enumerate() if thread.name in data.threads], "it has ended"


def test_the_time_waited_is_told(alone: DistributedContext) -> None:
    first = Run(alone, data=watched(pause=0.3)).go(CONFIG)[0]
    assert 0.6 <= first.data_seconds <= first.step_seconds, "two micro-batches, for which nothing else is done"


def test_an_error_in_the_thread_ends_the_run(alone: DistributedContext) -> None:
    class Broken(Watched):
        def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
            raise ValueError("row 3 cannot be read")

    data = stream()
    with pytest.raises(ValueError, match="row 3 cannot be read"):
        Run(alone, data=Broken(data.tokens, data.sequence_length, data.name)).go(CONFIG)


def test_losses_do_not_depend_on_it(alone: DistributedContext) -> None:
    assert losses(Run(alone, data=watched()).go(CONFIG)) == losses(Run(alone).go(CONFIG))
