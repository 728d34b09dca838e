"""The sample order depends on the seed only: every epoch has each sample once, at any place, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_shard.data.sample_order import epoch_order, sample_indices
from fsdp_shard.data.samples.batch import NO_WINDOW, evaluation_batches, micro_batches

SEEDS = st.integers(0, 2**40)
SIZES = st.integers(1, 60)


@given(seed=SEEDS, num_samples=SIZES, epoch=st.integers(0, 5))
def test_each_sample_once_an_epoch(seed: int, num_samples: int, epoch: int) -> None:
    indices = sample_indices(seed, num_samples, epoch * num_samples, num_samples)
    assert sorted(indices) == list(range(num_samples))


@given(seed=SEEDS, num_samples=SIZES, first=st.integers(0, 200), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_reading_on_gives_the_same_order(seed: int, num_samples: int, first: int, cuts: list[int]) -> None:
    whole = sample_indices(seed, num_samples, first, sum(cuts))
    place, pieces = first, []
    for count in cuts:
        pieces.extend(sample_indices(seed, num_samples, place, count))
        place += count
    assert pieces == whole.tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(epoch_order(seed, 50, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


FROZEN = [0, 3, 7, 5, 1, 2, 6, 4, 3, 7]
FROZEN_LATER = [1, 4, 2, 1, 0, 4]


def test_the_order_is_fixed_for_ever() -> None:
    """A run that began with one release must go on with the next: never change these numbers."""
    assert sample_indices(0, 8, 0, 10).tolist() == FROZEN
    assert sample_indices(7, 5, 12, 6).tolist() == FROZEN_LATER


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        sample_indices(0, 0, 0, 1)


@given(
    seed=SEEDS,
    num_samples=SIZES,
    step=st.integers(0, 30),
    micro=st.integers(1, 3),
    ranks=st.integers(1, 6),
    repeats=st.integers(1, 4),
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(
    seed: int, num_samples: int, step: int, micro: int, ranks: int, repeats: int
) -> None:
    size = micro * ranks * repeats
    samples = sample_indices(seed, num_samples, step * size, size)
    parts = [micro_batches(samples, micro, rank, ranks) for rank in range(ranks)]
    assert all(part.shape == (repeats, micro) for part in parts)
    together = np.stack(parts, axis=1).reshape(-1)  # micro-batch after micro-batch, rank after rank
    assert together.tolist() == samples.tolist()


def test_a_batch_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="6 samples in micro-batches of 2 on 2 ranks"):
        micro_batches(np.arange(6), 2, 0, 2)


@given(num_samples=st.integers(0, 60), micro=st.integers(1, 4), ranks=st.integers(1, 6))
def test_evaluation_sees_each_sample_once_with_equal_numbers_of_batches(
    num_samples: int, micro: int, ranks: int
) -> None:
    batches = [list(evaluation_batches(num_samples, micro, rank, ranks)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    seen = [int(i) for of_rank in batches for batch in of_rank for i in batch]
    assert sorted(i for i in seen if i != NO_WINDOW) == list(range(num_samples))
    assert all(len(batch) == micro for of_rank in batches for batch in of_rank)


def test_orders_of_several_sources_in_turn_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *words, **more: made.append(1) or original(*words, **more))
    for _ in range(3):
        for seed in range(1_000, 1_005):
            epoch_order(seed, 77, 0)
    assert len(made) == 5
