"""Windows give back the stream exactly: every token but the first is predicted, once, from those before it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.windows import WindowDataset


def dataset(num_tokens: int, length: int) -> WindowDataset:
    return WindowDataset(np.arange(1, num_tokens + 1, dtype=np.uint16), length, "name")


@given(num_tokens=st.integers(2, 300), length=st.integers(1, 64))
def test_windows_reproduce_the_stream(num_tokens: int, length: int) -> None:
    windows = dataset(num_tokens, length)
    batch = windows.batch(np.arange(len(windows)))
    counts = batch.labels != IGNORE_INDEX
    assert batch.input_ids[counts].tolist() == list(range(1, num_tokens))
    assert batch.labels[counts].tolist() == list(range(2, num_tokens + 1))
    assert not counts[:, :-1][counts[:, 1:] & ~counts[:, :-1]].any(), "padding comes last"
    assert batch.num_predictions == windows.num_predictions == num_tokens - 1
    assert windows.num_padded == counts.size - counts.sum() < length
    assert (batch.input_ids[~counts] == 0).all()


def test_fewer_tokens_than_one_window() -> None:
    windows = dataset(3, 8)
    assert len(windows) == 1
    batch = windows.batch([0])
    assert batch.input_ids.tolist() == [[1, 2, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3] + [IGNORE_INDEX] * 6]


def test_no_window_is_all_masked() -> None:
    batch = dataset(9, 4).batch([1, NO_WINDOW])
    assert batch.labels[1].tolist() == [IGNORE_INDEX] * 4
    assert batch.num_predictions == 4
    assert batch.input_ids.dtype == batch.labels.dtype == np.int64


@pytest.mark.parametrize("index", [2, -2])
def test_windows_that_are_not_there(index: int) -> None:
    with pytest.raises(IndexError):
        dataset(9, 4).batch([index])


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 20), data=st.data())
def test_slices_share_no_prediction_and_lose_none(num_tokens: int, length: int, data: st.DataObject) -> None:
    whole = dataset(num_tokens, length)
    cut = data.draw(st.integers(1, len(whole)))
    first, second = whole.slice(0, cut), whole.slice(cut, len(whole))
    assert len(first) == cut
    assert len(first) + len(second) == len(whole)
    assert first.num_predictions + second.num_predictions == whole.num_predictions
    if len(second):
        assert second.batch([0]).input_ids.tolist() == whole.batch([cut]).input_ids.tolist()
        assert len({whole.identity, first.identity, second.identity}) == 3


def test_head() -> None:
    windows = dataset(20, 4)
    assert windows.head(None) is windows
    assert windows.head(99) is windows
    assert windows.head(2).batch([0, 1]).labels.tolist() == windows.batch([0, 1]).labels.tolist()
    assert len(windows.head(2)) == 2


def test_identity_tells_streams_and_lengths_apart() -> None:
    assert dataset(20, 4).identity == dataset(20, 4).identity
    other = WindowDataset(np.arange(20), 4, "other")
    assert len({dataset(20, 4).identity, dataset(20, 5).identity, dataset(21, 4).identity, other.identity}) == 4
