"""Divides work evenly over ranks or threads."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def balanced_partition(items: Iterable[T], num_parts: int, size: Callable[[T], int]) -> list[list[T]]:
    """Divide `items` into parts of about the same total size.

    Items are assigned largest first, each to the part with the smallest total so far (longest processing time first).
    The order of `items` matters only for equal sizes, so ranks that pass the same order agree.

    Args:
        items: The items to divide.
        num_parts: Number of parts; some are empty if there are fewer items.
        size: Size of an item, in any unit.

    Returns:
        The items of each part, largest first.
    """
    parts: list[list[T]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for item in sorted(items, key=size, reverse=True):
        smallest = totals.index(min(totals))
        parts[smallest].append(item)
        totals[smallest] += size(item)
    return parts
