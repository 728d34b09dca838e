"""Intervals and p-values: against closed forms, all permutations, and how often an interval has the truth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fsdp_shard.evaluation import significance
from fsdp_shard.evaluation.significance import Difference, bootstrap_interval, sign_flip_p_value


def test_the_interval_is_that_of_the_normal_approximation_for_many_documents() -> None:
    rng = np.random.default_rng(0)
    tokens = np.full(400, 10.0)
    losses = rng.normal(30.0, 4.0, 400)
    interval = bootstrap_interval(losses, tokens, 4000, seed=1)
    assert interval is not None
    means = losses / 10
    half = 1.96 * means.std() / np.sqrt(400)
    assert interval == pytest.approx((means.mean() - half, means.mean() + half), abs=half / 10)


def test_long_documents_count_for_more() -> None:
    losses, tokens = np.array([10.0, 1000.0]), np.array([10.0, 500.0])
    interval = bootstrap_interval(losses, tokens, 2000, seed=0)
    assert interval == pytest.approx((1.0, 2.0)), "each extreme has one document twice"


def test_an_interval_has_the_truth_nearly_as_often_as_it_says() -> None:
    hits, rng = 0, np.random.default_rng(5)
    for seed in range(200):
        tokens = rng.integers(5, 50, 60).astype(float)
        losses = tokens * 3.0 + rng.normal(0, 1, 60) * np.sqrt(tokens)
        low, high = bootstrap_interval(losses, tokens, 400, seed) or (0.0, 0.0)
        hits += low <= 3.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_p_value_is_that_of_all_sign_flips() -> None:
    differences = np.array([1.0, 2.5, -0.5, 3.0, 0.7, 1.1])
    sums = np.array([np.dot(signs, differences) for signs in product((-1, 1), repeat=6)])
    exact = np.mean(np.abs(sums) >= abs(differences.sum()) - 1e-12)
    assert sign_flip_p_value(differences, 50_000, seed=0) == pytest.approx(exact, abs=0.01)


def test_figures_do_not_depend_on_how_many_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    first, other, tokens = rng.normal(9, 1, 30), rng.normal(10, 1, 30), np.full(30, 5.0)
    whole = Difference.between(first, other, tokens, 1000, seed=3)
    assert whole == Difference.between(first, other, tokens, 1000, seed=3)
    assert whole != Difference.between(first, other, tokens, 1000, seed=4)
    monkeypatch.setattr(significance, "_NUMBERS_AT_ONCE", 64)
    parts = Difference.between(first, other, tokens, 1000, seed=3)
    assert parts.interval == pytest.approx(whole.interval)
    assert parts.p_value == whole.p_value


def test_a_single_document_has_no_interval() -> None:
    one = np.array([3.0])
    assert bootstrap_interval(one, one, 100, 0) is None
    assert sign_flip_p_value(one, 100, 0) is None
    assert "no test" in Difference.between(one, one, one, 100, 0).sentence("base", 1.0, 1.0)
