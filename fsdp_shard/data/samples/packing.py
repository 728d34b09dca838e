"""Several examples in one window: which go together (best fit), and how they are kept apart.

Positions start again at each example. transformers sees from that where one begins, and its masks (sdpa, eager, flash)
then let no token attend to another example: nothing else is given, no mask above all, or it would not look. The same
goes for sliding windows. Which models can do this is in `positions.py`. Knows no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.sample_order import epoch_order, sample_indices
from fsdp_shard.data.samples.padded import CausalRows, next_tokens
from fsdp_shard.data.samples.windows import MASKED, NO_WINDOW, Batch

_ORDER = 1  # changed when the same number shall be another window


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Places in `lengths` by window: the longest first, each into the window that it leaves the least room in.

    Best-fit decreasing (Johnson, 1973): never more than 11/9 of the fewest windows possible. A length of more than
    `capacity` is a mistake.
    """
    assert not len(lengths) or 0 < int(lengths.min()) <= int(lengths.max()) <= capacity
    windows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room -> windows that have so much, the last made last
    rooms: list[int] = []  # the keys of `with_room`, in order
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, room = len(windows), capacity
            windows.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        windows[number].append(place)
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(number)
    return windows


@dataclass(frozen=True)
class PackedDataset:
    """Windows of several rows of `rows` each: window i has those in `places` from `starts[i]` to `starts[i + 1]`."""

    rows: CausalRows
    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    part: str = ""

    @classmethod
    def pack(cls, rows: CausalRows) -> Self:
        """Best fit over all of `rows`; the windows in an order that is the same each time, so that some of them, as
        those that are held out, are like the others: best fit makes those of long rows first.
        """
        lengths = np.minimum(rows.examples.lengths[rows.kept] - 1, rows.sequence_length)
        fitted = best_fit(lengths, rows.sequence_length)
        windows = [fitted[number] for number in epoch_order(_ORDER, len(fitted), 0)]
        starts = np.cumsum([0, *(len(window) for window in windows)])
        return cls(rows, np.asarray([place for window in windows for place in window], np.int64), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sequence_length(self) -> int:
        return self.rows.sequence_length

    @property
    def identity(self) -> str:
        return f"packed-{_ORDER}{self.part}:{len(self)}:{self.rows.identity}"

    @property
    def num_predictions(self) -> int:
        return sum(self.batch([index]).num_predictions for index in range(len(self)))

    @property
    def num_padded(self) -> int:
        """Places of all windows that hold no token."""
        used = self.rows.examples.lengths[self.rows.kept[self.places[self.starts[0] : self.starts[-1]]]] - 1
        return len(self) * self.sequence_length - int(np.minimum(used, self.sequence_length).sum())

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        return sample_indices(seed, len(self), first, count)

    def head(self, num_windows: int | None) -> Self:
        return self if num_windows is None or num_windows >= len(self) else self.slice(0, num_windows)

    def slice(self, first: int, last: int) -> Self:
        return replace(self, starts=self.starts[first : last + 1], part=f"{self.part}+{first}")

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The windows of `indices`, with `position_ids`; padding is one more example, of which nothing is predicted."""
        shape = (len(indices), self.sequence_length)
        batch = Batch(np.zeros(shape, np.int64), np.full(shape, MASKED, np.int64))
        positions = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for place in [] if index == NO_WINDOW else self._places(int(index)):
                inputs, labels = next_tokens(self.rows.examples, int(self.rows.kept[place]), self.sequence_length)
                here = slice(at, at := at + len(inputs))
                batch.input_ids[row, here], batch.labels[row, here] = inputs, labels
                positions[row, here] = np.arange(len(inputs))
            positions[row, at:] = np.arange(self.sequence_length - at)
        return replace(batch, others={"position_ids": positions})

    def _places(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.places[self.starts[index] : self.starts[index + 1]]
