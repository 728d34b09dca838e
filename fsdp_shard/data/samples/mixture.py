"""Samples of several sources in one order, by weights; each source is a data set of its own. Knows no torch.

A source goes through its samples in its own seeded order, and begins another epoch, in another order, when it has come
to their end, whatever the others do. Which source is next is in `shares.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.samples.collate import merge
from fsdp_shard.data.samples.mixture_schedule import counts_before, places_until, turns
from fsdp_shard.data.samples.protocol import HeldOut
from fsdp_shard.data.samples.windows import NO_WINDOW, Batch


@dataclass(frozen=True)
class Mixture:
    """`parts` by name, of which each has `shares` [num_parts] of every round of samples.

    Numbered are the samples of one part after those of another; numbers count on through epochs where those of the part
    do (`MaskedWindows`).
    """

    names: tuple[str, ...]
    parts: tuple[HeldOut, ...]
    shares: tuple[int, ...]

    @classmethod
    def of(cls, parts: Mapping[str, HeldOut], shares: Mapping[str, int]) -> Self:
        """Sorted by name, so that the order of the settings does not matter."""
        names = tuple(sorted(parts))
        return cls(names, tuple(parts[name] for name in names), tuple(shares[name] for name in names))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def sequence_length(self) -> int:
        return max(part.sequence_length for part in self.parts)

    @property
    def identity(self) -> str:
        described = zip(self.names, self.shares, self.parts, strict=True)
        return "mixture:" + ",".join(f"{name}={share}*{part.identity}" for name, share, part in described)

    @property
    def num_predictions(self) -> int:
        return sum(part.num_predictions for part in self.parts)

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        sources = turns(self.shares, first, count)
        before = counts_before(self.shares, first)
        samples = np.empty(count, np.int64)
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            mine = np.flatnonzero(sources == number)
            inner = part.order(seed_of(seed, name), int(before[number]), len(mine))
            epochs, places = np.divmod(inner, len(part))
            samples[mine] = epochs * len(self) + self._offsets[number] + places
        return samples

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        given = np.asarray(indices, np.int64)
        epochs, places = np.divmod(given, len(self))
        owners = self.owners(given)
        owners[given == NO_WINDOW] = 0
        pieces = []
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(owners == number)
            if len(rows):
                inner = epochs[rows] * len(part) + places[rows] - self._offsets[number]
                pieces.append((rows, part.batch(np.where(given[rows] == NO_WINDOW, NO_WINDOW, inner))))
        return merge(pieces)

    def owners(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number, in `names`, of the source of each sample."""
        return np.searchsorted(self._offsets, indices % len(self), side="right") - 1

    def head(self, num_windows: int | None) -> Self:
        """The first of each part, as many as fits its size: a sample of all of them."""
        if num_windows is None or num_windows >= len(self):
            return self
        ends = np.cumsum([len(part) for part in self.parts]) * num_windows // len(self)
        sizes = np.diff(ends, prepend=0).tolist()
        return self._of([part.head(size) if size else None for part, size in zip(self.parts, sizes, strict=True)])

    def slice(self, first: int, last: int) -> Self:
        pieces: list[HeldOut | None] = []
        for part, offset in zip(self.parts, self._offsets.tolist(), strict=True):
            start, stop = max(first - offset, 0), min(last - offset, len(part))
            pieces.append(part.slice(start, stop) if start < stop else None)
        return self._of(pieces)

    def seen(self, num_samples: int) -> dict[str, dict[str, Any]]:
        """By name, what of each part is among the first `num_samples` samples of the order."""
        counts = counts_before(self.shares, num_samples).tolist()
        parts = zip(self.names, self.parts, counts, self.shares, strict=True)
        return {
            name: {
                "share": share / sum(self.shares),
                "samples": count,
                "epochs": round(count / len(part), 4),
            }
            for name, part, count, share in parts
        }

    def samples_for_one_epoch(self) -> dict[str, int]:
        """By name, after how many samples of the order the last sample of that part has come for the first time."""
        lengths = enumerate(zip(self.names, map(len, self.parts), strict=True))
        return {name: places_until(self.shares, number, length) for number, (name, length) in lengths}

    @property
    def _offsets(self) -> npt.NDArray[np.int64]:
        """The number of each part's first sample."""
        return np.cumsum([0, *(len(part) for part in self.parts[:-1])])

    def _of(self, parts: Sequence[HeldOut | None]) -> Self:
        kept = [(n, p, s) for n, p, s in zip(self.names, parts, self.shares, strict=True) if p is not None]
        return type(self)(*map(tuple, zip(*kept, strict=True)))


def seed_of(seed: int, name: str) -> int:
    """So that sources of one size are not gone through in one order."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())
