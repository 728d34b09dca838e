"""Sweeps of many cases, of which `make check` runs some and `make slow` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int, name: Callable[[Any], str] = str) -> list[Any]:
    """`cases` as parameters of a test: the first of each `every` of them as it is, the others marked slow.

    Args:
        cases: A value, or a tuple of the values, of each case.
        every: How many cases `make check` runs one of.
        name: The name of a case in the test's id.
    """
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            id=name(case),
            marks=[pytest.mark.slow] if number % every else [],
        )
        for number, case in enumerate(cases)
    ]
