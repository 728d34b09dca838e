"""Packs several examples into each window by best fit, and keeps them apart.

Positions restart at each example. transformers detects the boundaries from that, and its masks (sdpa, eager, flash,
sliding windows) then let no token attend to another example. It does so only without an attention mask, so none is
passed. `models.check_packing` rejects models that do not support this.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

import numpy as np

from fsdp_shard.data.sample_order import permutation
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NUM_PARTS, Ints, Sample, pad
from fsdp_shard.data.samples.rows import RowDataset, next_labels
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.utils import format_count

ORDER = 1  # changes when an index refers to another window


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
    by_space = defaultdict[int, list[int]](list)  # free space -> windows with that much space, the newest last
    spaces = [capacity]  # the keys of `by_space` that have windows, sorted, and the space of a new window
    for item in np.argsort(-lengths, kind="stable").tolist():
        space = spaces[bisect_left(spaces, lengths[item])]
        if space == capacity:
            by_space[space].append(len(windows))
            windows.append([])
        number = by_space[space].pop()
        windows[number].append(item)
        if not by_space[space] and space < capacity:
            spaces.remove(space)
        left = space - int(lengths[item])
        if not by_space[left]:
            insort(spaces, left)
        by_space[left].append(number)
    return windows


def packed_windows(lengths: Ints, capacity: int) -> tuple[list[int], Ints]:
    """Pack items by best fit, and shuffle the windows with a fixed seed.

    Best fit starts with the longest items; shuffled, any part, such as the first held-out windows, is like the rest.

    Args:
        lengths: As in `best_fit`.
        capacity: As in `best_fit`.

    Returns:
        The items in the order of the windows, and where each window begins and the last one ends [num_windows + 1].
    """
    fitted = best_fit(lengths, capacity)
    windows = [fitted[number] for number in permutation(len(fitted), ORDER, 0)]
    return list(chain.from_iterable(windows)), np.cumsum([0, *(len(window) for window in windows)])


@dataclass(frozen=True)
class PackedRows(RowDataset):
    """Several examples per window: window i contains the examples `kept[starts[i] : starts[i + 1]]`."""

    starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))

    @classmethod
    def pack(cls, examples: Examples, kept: Ints, sequence_length: int) -> Self:
        """Pack the examples `kept` by best fit."""
        lengths = np.minimum(examples.lengths[kept] - 1, sequence_length)
        order, starts = packed_windows(lengths, sequence_length)
        return cls(examples, kept[order], sequence_length, "", starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def identity(self) -> str:
        rows = f"CausalRows:{self.examples.name}:{len(self.kept)}/{self.sequence_length}"
        return f"packed-{ORDER}{self.part}:{len(self)}:{rows}"

    @property
    def summary(self) -> str:
        lengths = self.examples.lengths[self.kept[self.starts[0] : self.starts[-1]]] - 1
        full = np.minimum(lengths, self.sequence_length).sum() / (len(self) * self.sequence_length)
        return f"packed into {format_count(len(self), 'window')} of {self.sequence_length} ({full:.1%} full)"

    def slice(self, first: int, last: int) -> Self:
        return replace(self, starts=self.starts[first : last + 1], part=f"{self.part}+{first}")

    def examples_of(self, index: int) -> Ints:
        """Return the numbers of the examples in a window."""
        return self.kept[self.starts[index] : self.starts[index + 1]]

    def documents(self) -> Iterator[Ints]:
        """Yield the tokens of each document, of a long one the joined pieces, which overlap by a token."""
        pieces: list[Ints] = []
        before = -1, -1  # the number that follows the previous example, and its last token
        for number in np.sort(self.kept[self.starts[0] : self.starts[-1]]).tolist():
            ids = self.examples.tokens_of(number)[0][: self.sequence_length + 1].astype(np.int64)
            if pieces and before != (number, int(ids[0])):
                yield np.concatenate(pieces)
                pieces = []
            pieces.append(ids[1:] if pieces else ids)
            before = number + 1, int(ids[-1])
        if pieces:
            yield np.concatenate(pieces)

    def _sample(self, index: int | None, epoch: int) -> Sample:
        numbers = [] if index is None else self.examples_of(index).tolist()
        documents = [next_labels(*self.examples.tokens_of(number), self.sequence_length) for number in numbers]
        return join_documents(documents, self.sequence_length)


def join_documents(documents: Iterable[tuple[Ints, Ints]], length: int, part: int | None = None) -> Sample:
    """Return a window of documents, with `position_ids`; padding is one more document, in which nothing is predicted.

    Args:
        documents: Inputs and labels of each.
        length: Number of tokens of the window.
        part: Which part of a pair each document is, such as CHOSEN_PART; None if they do not belong to pairs.
    """
    ids, labels, positions = pad([], length), pad([], length, IGNORE_INDEX), pad([], length)
    segments, end = pad([], length), 0
    for number, (inputs, targets) in enumerate(documents):
        span = slice(end, end := end + len(inputs))
        ids[span], labels[span], positions[span] = inputs, targets, np.arange(len(inputs))
        segments[span] = NUM_PARTS * number + (part or 0)
    positions[end:] = np.arange(length - end)
    return Sample({"input_ids": ids, "position_ids": positions}, labels, segments=None if part is None else segments)
