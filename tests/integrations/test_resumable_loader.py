"""`ResumableLoader` without a trainer: which states it goes on with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.integrations import ResumableLoader


def _loader(first: int) -> ResumableLoader:
    return ResumableLoader(Dataset.from_dict({"x": [*range(first, first + 8)]}), 2)


def test_it_does_not_go_on_with_other_rows() -> None:
    loader = _loader(0)
    next(iter(loader))
    state = loader.state_dict()
    again = _loader(0)
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(CheckpointError, match=f"some of the rows have the digest {state['rows']}, and now "):
        _loader(1).load_state_dict(state)


def test_it_goes_on_with_states_without_a_digest_of_rows() -> None:
    """As earlier versions, and data whose rows are not read for it, have them."""
    tensors = ResumableLoader(torch.arange(8), 2)
    state = tensors.state_dict()
    assert "rows" not in state
    tensors.load_state_dict(state)
    _loader(1).load_state_dict(state)
    tensors.load_state_dict(_loader(1).state_dict())


def _broken_off(loader: ResumableLoader) -> Iterator[Any]:
    for number, batch in enumerate(loader, start=1):
        yield batch
        if number == len(loader):
            break


@pytest.mark.parametrize("stopping", [
    lambda loader: islice(loader, len(loader)),
    lambda loader: (batch for _, batch in zip(range(len(loader)), loader, strict=False)),
    _broken_off,
])  # fmt: skip
def test_a_loop_that_stops_at_the_last_batch(stopping: Callable[[ResumableLoader], Iterator[torch.Tensor]]) -> None:
    exhausted, stopped = (ResumableLoader(torch.arange(8), 2, shuffle=True) for _ in range(2))
    for epoch in range(4):
        assert [batch.tolist() for batch in stopping(stopped)] == [batch.tolist() for batch in exhausted]
        assert (stopped.epoch, exhausted.epoch) == (epoch, epoch + 1)


def test_a_state_after_the_last_batch_ends_its_epoch() -> None:
    whole, again, named = (ResumableLoader(torch.arange(8), 2, shuffle=True) for _ in range(3))
    for _ in whole:
        state = whole.state_dict()
    expected = [batch.tolist() for batch in whole]
    assert (state["epoch"], state["next_batch"]) == (0, 4)
    again.load_state_dict(state)
    assert list(again) == [], "a finished job that is started again trains nothing"
    assert [batch.tolist() for batch in again] == expected
    named.load_state_dict(state)
    epochs = []
    for epoch in range(2):  # a loop that continues the epoch in which it was stopped
        named.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in named])
    assert epochs == [[], expected]


class _Noisy:
    """Rows with random numbers of each kind."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), np.random.rand(), torch.rand(()).item()]


class _NoisyBatches(_Noisy):
    """Reads whole batches, as datasets do."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in indices]


def _rows(loader: ResumableLoader) -> list[Any]:
    return [torch.stack(batch).tolist() for batch in loader]


def _drawn(*epochs: list[Any]) -> set[float]:
    return {number for epoch in epochs for batch in epoch for drawn in batch[1:] for number in drawn}


@pytest.mark.long
@pytest.mark.parametrize("dataset", [_Noisy(), _NoisyBatches()], ids=["rows", "batches"])
def test_what_workers_draw_goes_on_within_an_epoch(dataset: Any) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2}
    whole = ResumableLoader(dataset, 2, **options)
    epochs = [_rows(whole), _rows(whole)]
    assert len(_drawn(*epochs)) == 3 * 16, "all of them differ"
    for num_workers in (1, 2):
        again = ResumableLoader(dataset, 2, **options | {"num_workers": num_workers})
        for epoch, batches in enumerate(epochs):
            for position in range(1, 4):
                again.load_state_dict({**whole.state_dict(), "epoch": epoch, "next_batch": position})
                assert _rows(again) == batches[position:]
    one, other = (ResumableLoader(dataset, 4, num_workers=1, num_replicas=2, rank=rank) for rank in range(2))
    assert len(_drawn(_rows(one), _rows(other))) == 3 * 8, "on each rank"


def _open_rows(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    rows: Any = info.dataset
    rows.offset = rows.start + worker


class _Opened:
    """Rows that need what a worker opens."""

    start, offset = 100, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.offset + index


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_open_what_the_dataset_needs(context: str) -> None:
    loader = ResumableLoader(_Opened(), 2, num_workers=1, worker_init_fn=_open_rows, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [[100, 101], [102, 103]]


@pytest.mark.parametrize(("given", "said"), [
    ({"global_batch_size": 0}, "global_batch_size=0 of ResumableLoader is not an int from 1 on"),
    ({"global_batch_size": 2.0}, "global_batch_size=2.0 of"),
    ({"num_replicas": 0, "rank": 0}, "num_replicas=0 of"),
    ({"num_replicas": 2, "rank": -1}, "rank=-1 of ResumableLoader is not an int from 0 on"),
    ({"num_replicas": 2, "rank": 5}, "rank=5 of ResumableLoader is not one of num_replicas=2 ranks"),
])  # fmt: skip
def test_sizes_that_are_none(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(ResumableLoader(torch.arange(8), **{"global_batch_size": 4, **given}))


@pytest.mark.parametrize("wrong", [{"next_batch": -1}, {"next_batch": 5}, {"epoch": None}, {"epoch": -1}])
def test_a_state_that_is_no_position(wrong: dict[str, Any]) -> None:
    loader = ResumableLoader(torch.arange(8), 2)
    (name, value), *_ = wrong.items()
    with pytest.raises(CheckpointError, match=rf"{name}={value}.* is no position of ResumableLoader: expected ints"):
        loader.load_state_dict(loader.state_dict() | wrong)
    assert len(list(loader)) == 4
