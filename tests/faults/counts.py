"""How often each fault was tried and what came of it; `make faults` prints the table."""

from __future__ import annotations

from collections import Counter

TRIED: Counter[str] = Counter()
FAILED: Counter[str] = Counter()


def count(fault: str, *, failed: bool = False, times: int = 1) -> None:
    TRIED[fault] += times
    FAILED[fault] += times if failed else 0


def table() -> list[str]:
    """One line a fault."""
    width = max(map(len, TRIED), default=0)
    return [f"{fault:<{width}}  {TRIED[fault]:6d} tried  {FAILED[fault]:4d} broke the promise" for fault in TRIED]
