"""The table of `make faults`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import counts
from tests.faults.saves import LONG


@pytest.fixture(scope="package", autouse=True)
def _table() -> Iterator[None]:
    yield
    if LONG:
        print("\n" + "\n".join(counts.table()))
