"""Several examples in one window: which are packed together (best fit), and how they are kept apart.

Positions restart at each example. transformers detects the boundaries from that, and its masks (sdpa, eager, flash,
sliding windows) then let no token attend to another example. It does so only without an attention mask, so none is
given. `models.check_packing` tells which models support this.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from fsdp_shard.data.sample_order import epoch_order
from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, empty_batch
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.samples.rows import CausalRows, next_tokens
from fsdp_shard.utils import format_count

_ORDER = 1  # changes if the same index becomes another window


def best_fit(lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack items into windows: the longest first, each into the window with the least free space that fits it.

    Best-fit decreasing (Johnson, 1973) needs at most 11/9 of the fewest windows possible.

    Args:
        lengths: Lengths [num_items], from 1 to `capacity`.
        capacity: Size of a window.

    Returns:
        The positions in `lengths` of the items of each window.
    """
    assert not len(lengths) or 0 < int(lengths.min()) <= int(lengths.max()) <= capacity
    windows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free space -> windows with that much, the newest last
    spaces: list[int] = []  # the keys of `by_space`, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        found = bisect_left(spaces, length)
        if found == len(spaces):
            number, space = len(windows), capacity
            windows.append([])
        else:
            space = spaces[found]
            number = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[found]
        windows[number].append(item)
        if left := space - length:
            if left not in by_space:
                insort(spaces, left)
            by_space.setdefault(left, []).append(number)
    return windows


@dataclass(frozen=True)
class PackedDataset(MapDataset):
    """Windows of several rows: window i has the rows `items[starts[i] : starts[i + 1]]` of `rows`."""

    rows: CausalRows
    items: Ints
    starts: Ints
    sequence_length: int
    part: str = ""

    @classmethod
    def pack(cls, rows: CausalRows) -> Self:
        """Pack all of `rows` by best fit.

        The windows are then shuffled with a fixed seed, so that a part of them, such as the held-out windows, is like
        the rest: best fit starts with the longest rows.
        """
        lengths = np.minimum(rows.examples.lengths[rows.kept] - 1, rows.sequence_length)
        fitted = best_fit(lengths, rows.sequence_length)
        windows = [fitted[number] for number in epoch_order(_ORDER, len(fitted), 0)]
        starts = np.cumsum([0, *(len(window) for window in windows)])
        items = np.asarray([item for window in windows for item in window], np.int64)
        return cls(rows, items, starts, rows.sequence_length)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def identity(self) -> str:
        return f"packed-{_ORDER}{self.part}:{len(self)}:{self.rows.identity}"

    @property
    def summary(self) -> str:
        full = 1 - self.num_padded / (len(self) * self.sequence_length)
        return f"packed into {format_count(len(self), 'window')} of {self.sequence_length} ({full:.1%} full)"

    @property
    def num_padded(self) -> int:
        """Positions without a token, over all windows."""
        used = self.rows.examples.lengths[self.rows.kept[self.items[self.starts[0] : self.starts[-1]]]] - 1
        return len(self) * self.sequence_length - int(np.minimum(used, self.sequence_length).sum())

    def slice(self, first: int, last: int) -> Self:
        return replace(self, starts=self.starts[first : last + 1], part=f"{self.part}+{first}")

    def batch(self, indices: Indices) -> Batch:
        """Stack windows, with `position_ids`; padding is one more example in which nothing is predicted."""
        batch = empty_batch(len(indices), self.sequence_length, "position_ids")
        positions = batch.others["position_ids"]
        for row, index in enumerate(indices):
            end = 0
            for item in [] if index == NO_WINDOW else self._items(int(index)):
                inputs, labels = next_tokens(self.rows.examples, int(self.rows.kept[item]), self.sequence_length)
                span = slice(end, end := end + len(inputs))
                batch.input_ids[row, span], batch.labels[row, span] = inputs, labels
                positions[row, span] = np.arange(len(inputs))
            positions[row, end:] = np.arange(self.sequence_length - end)
        return batch

    def _items(self, index: int) -> Ints:
        return self.items[self.starts[self.checked(index)] : self.starts[index + 1]]
