"""Samples of several sources in one order, by weights; each source is a dataset of its own.

Each source has its own seeded order, and begins another epoch, in another order, when it is used up, whatever the
others do. `mixture_schedule` decides which source is next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash

from fsdp_shard.data.samples import mixture_schedule as schedule
from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, merge
from fsdp_shard.data.samples.protocol import MapDataset


@dataclass(frozen=True)
class Mixture(MapDataset):
    """The datasets `parts` by name; each has `counts` [num_parts] samples in every round.

    The indices of one part follow those of another. They include the epoch if those of the part do (`MaskedWindows`).
    """

    names: tuple[str, ...]
    parts: tuple[MapDataset, ...]
    counts: tuple[int, ...]
    sequence_length: int

    @classmethod
    def of(cls, parts: Mapping[str, MapDataset], counts: Mapping[str, int]) -> Self:
        """Build a mixture, sorted by name, so that the order of the settings does not matter."""
        names = tuple(sorted(parts))
        length = max(part.sequence_length for part in parts.values())
        return cls(names, tuple(parts[name] for name in names), tuple(counts[name] for name in names), length)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def identity(self) -> str:
        return schedule.mixture_identity(self.names, self.counts, (part.identity for part in self.parts))

    @property
    def summary(self) -> str:
        lengths = enumerate(zip(self.names, map(len, self.parts), strict=True))
        until = {name: schedule.samples_until(self.counts, number, length) for number, (name, length) in lengths}
        listed = ", ".join(f"{name} {num:,}" for name, num in until.items())
        return f"samples of the mixture until a source repeats: {listed}"

    @property
    def num_predictions(self) -> int:
        return sum(part.num_predictions for part in self.parts)

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.names

    def order(self, seed: int, first: int, count: int) -> Ints:
        sources = schedule.scheduled_sources(self.counts, first, count)
        before = schedule.counts_before(self.counts, first)
        samples = np.empty(count, np.int64)
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            positions = np.flatnonzero(sources == number)
            inner = part.order(seed_of(seed, name), int(before[number]), len(positions))
            epochs, indices = np.divmod(inner, len(part))
            samples[positions] = epochs * len(self) + self._offsets[number] + indices
        return samples

    def batch(self, indices: Indices) -> Batch:
        given = np.asarray(indices, np.int64)
        epochs, within = np.divmod(given, len(self))
        sources = self.sources_of(given)
        sources[given == NO_WINDOW] = 0
        pieces = []
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(sources == number)
            if len(rows):
                inner = epochs[rows] * len(part) + within[rows] - self._offsets[number]
                pieces.append((rows, part.batch(np.where(given[rows] == NO_WINDOW, NO_WINDOW, inner))))
        return merge(pieces)

    def sources_of(self, indices: Ints) -> Ints:
        return np.searchsorted(self._offsets, indices % len(self), side="right") - 1

    def head(self, num_samples: int | None) -> Self:
        """Return the first samples of each part, in proportion to its size."""
        if num_samples is None or num_samples >= len(self):
            return self
        ends = np.cumsum([len(part) for part in self.parts]) * num_samples // len(self)
        sizes = np.diff(ends, prepend=0).tolist()
        return self._of([part.head(size) if size else None for part, size in zip(self.parts, sizes, strict=True)])

    def slice(self, first: int, last: int) -> Self:
        pieces: list[MapDataset | None] = []
        for part, offset in zip(self.parts, self._offsets.tolist(), strict=True):
            start, stop = max(first - offset, 0), min(last - offset, len(part))
            pieces.append(part.slice(start, stop) if start < stop else None)
        return self._of(pieces)

    def figures(self, num_samples: int) -> dict[str, Any]:
        seen = schedule.proportions(self.names, self.counts, num_samples)
        for name, part in zip(self.names, self.parts, strict=True):
            seen[name]["epochs"] = round(seen[name]["samples"] / len(part), 4)
        return {"sources": seen}

    @property
    def _offsets(self) -> Ints:
        """The index of each part's first sample."""
        return np.cumsum([0, *(len(part) for part in self.parts[:-1])])

    def _of(self, parts: Sequence[MapDataset | None]) -> Self:
        kept = {name: part for name, part in zip(self.names, parts, strict=True) if part is not None}
        return self.of(kept, dict(zip(self.names, self.counts, strict=True)))


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source, so that sources of the same size have different orders."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())
