"""In which batches prompts run: those of like length together, within windows that keep the output's order near.

Pure. The batches depend on the lengths and the batch size alone, so a run that goes on has those of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

_WINDOW_BATCHES = 16  # rows are written in input order: at most so many batches wait for an earlier prompt


def windows(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> Iterator[list[list[int]]]:
    """Batches of positions in `lengths`, longest first, a window at a time.

    With `equal`, those of a batch are of one length, for models that read padding too. The longest come first: if a
    batch does not fit in memory, that is known at once.
    """
    size = batch_size * _WINDOW_BATCHES
    for first in range(0, len(lengths), size):
        order = sorted(range(first, min(first + size, len(lengths))), key=lambda place: -lengths[place])
        alike = groupby(order, key=lambda place: lengths[place] if equal else 0)
        runs = [list(places) for _, places in alike]
        yield [run[start : start + batch_size] for run in runs for start in range(0, len(run), batch_size)]
