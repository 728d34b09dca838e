"""Batches: every prompt once, those of like length together, the same for a run that goes on."""

from __future__ import annotations

from hypothesis import given, strategies as st

from fsdp_shard.inference.generation.batching import windows


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 5))
def test_every_prompt_is_in_one_batch(lengths: list[int], batch_size: int) -> None:
    found = list(windows(lengths, batch_size))
    assert sorted(place for window in found for batch in window for place in batch) == list(range(len(lengths)))
    first = 0
    for window in found:
        flat = [place for batch in window for place in batch]
        assert sorted(flat) == list(range(first, first + len(flat)))
        assert [lengths[place] for place in flat] == sorted((lengths[place] for place in flat), reverse=True)
        assert all(0 < len(batch) <= batch_size for batch in window)
        first += len(flat)


@given(st.lists(st.integers(1, 5), max_size=200), st.integers(1, 5))
def test_batches_of_one_length(lengths: list[int], batch_size: int) -> None:
    found = [batch for window in windows(lengths, batch_size, equal=True) for batch in window]
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert all(len({lengths[place] for place in batch}) == 1 and len(batch) <= batch_size for batch in found)
