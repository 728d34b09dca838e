"""The sample order depends on the seed only: every epoch has each sample once, at any place, on any number of ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_shard.data.samples.mixture import Mixture
from fsdp_shard.data.samples.protocol import ShuffledDataset
from fsdp_shard.data.samples.windows import WindowDataset
from fsdp_shard.errors import ConfigError

SEEDS = st.integers(0, 2**40)
SIZES = st.integers(1, 60)


def order(seed: int, num_samples: int, first: int, count: int) -> list[int]:
    samples = ShuffledDataset(WindowDataset(np.arange(num_samples + 1), 1, "x"), seed)
    inputs = samples.batch(range(first, first + count)).input_ids[:, 0].tolist() if count else []
    assert inputs == [samples.index_of(position) for position in range(first, first + count)]
    return inputs


@given(seed=SEEDS, num_samples=SIZES, epoch=st.integers(0, 5))
def test_each_sample_once_an_epoch(seed: int, num_samples: int, epoch: int) -> None:
    assert sorted(order(seed, num_samples, epoch * num_samples, num_samples)) == list(range(num_samples))


@given(seed=SEEDS, num_samples=SIZES, first=st.integers(0, 200), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_reading_on_gives_the_same_order(seed: int, num_samples: int, first: int, cuts: list[int]) -> None:
    whole = order(seed, num_samples, first, sum(cuts))
    place, pieces = first, []
    for count in cuts:
        pieces.extend(order(seed, num_samples, place, count))
        place += count
    assert pieces == whole


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(order(seed, 50, 50 * epoch, 50)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


FROZEN = [0, 3, 7, 5, 1, 2, 6, 4, 3, 7]
FROZEN_LATER = [1, 4, 2, 1, 0, 4]


def test_the_order_is_fixed_for_ever() -> None:
    """A run that began with one release must go on with the next: never change these numbers."""
    assert order(0, 8, 0, 10) == FROZEN
    assert order(7, 5, 12, 6) == FROZEN_LATER


def test_a_single_source_has_the_number_0() -> None:
    assert ShuffledDataset(WindowDataset(np.arange(9), 1, "x"), 0).sources_of(np.arange(3)).tolist() == [0, 0, 0]


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        order(0, 0, 0, 1)


def test_orders_of_several_sources_in_turn_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *words, **more: made.append(1) or original(*words, **more))
    parts = {name: ShuffledDataset(WindowDataset(np.arange(78), 1, name), seed) for seed, name in enumerate("abcde")}
    mixed = Mixture(parts, dict.fromkeys(parts, 1))
    mixed.batch(range(5 * 77))
    assert len(made) == 5
    mixed.batch(range(5 * 77 - 2, 5 * 77 + 10))
    assert len(made) == 10, "each has begun another epoch"


@pytest.mark.parametrize("found", [-1, 9, 0.0, "a", None])
def test_ones_own_order_names_samples(found: Any) -> None:
    class Own(ShuffledDataset):
        def index_of(self, position: int) -> Any:
            return found if position else np.int64(3)

    data = WindowDataset(np.arange(10), 1, "x")
    own = Own(data, 0)
    assert own.sample(0).labels.tolist() == data.sample(3).labels.tolist()
    with pytest.raises(ConfigError, match=re.escape(f"Own.index_of(1) returned {found!r}; it must return the index")):
        own.batch([0, 1])
