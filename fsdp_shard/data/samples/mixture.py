"""Samples of several sources: in one order by weights to train on, or one source after the other as held-out data.

Each source has its own seeded order, and begins another epoch, in another order, when it is used up, whatever the
others do. `mixture_schedule` decides which source is next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
import xxhash

from fsdp_shard.data.samples.batch import Ints, Sample
from fsdp_shard.data.samples.mixture_schedule import one_round
from fsdp_shard.data.samples.protocol import Dataset, MapDataset, SourceDataset
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count


class Mixture(Dataset):
    """The datasets `parts` by name; each has `counts` of the samples in every round."""

    def __init__(self, parts: Mapping[str, Dataset], counts: Mapping[str, int]) -> None:
        self.source_names = tuple(sorted(parts))  # so that the order of the settings does not matter
        self.parts = tuple(parts[name] for name in self.source_names)
        self.counts = tuple(counts[name] for name in self.source_names)
        self.sequence_length = max(part.sequence_length for part in self.parts)
        listed = zip(self.source_names, self.counts, self.parts, strict=True)
        self.identity = "mixture:" + ",".join(f"{name}={count}*{part.identity}" for name, count, part in listed)
        lengths = [part.num_samples for part in self.parts if part.num_samples is not None]
        self.num_samples = sum(lengths) if len(lengths) == len(self.parts) else None
        self._sources = one_round(self.counts)
        is_source = (self._sources[:, None] == np.arange(len(self.parts))).astype(np.int64)
        self._before = np.cumsum(is_source, axis=0) - is_source

    @property
    def sources(self) -> list[SourceDataset]:
        return [source for part in self.parts for source in part.sources]

    def with_sources(self, sources: Sequence[SourceDataset]) -> Mixture:
        given, names = iter(sources), self.source_names
        parts = [part.with_sources(list(islice(given, len(part.sources)))) for part in self.parts]
        return Mixture(dict(zip(names, parts, strict=True)), dict(zip(names, self.counts, strict=True)))

    def sources_of(self, positions: Ints) -> Ints:
        return self._sources[positions % len(self._sources)]

    def counts_before(self, positions: Ints) -> Ints:
        """Return how many samples of each source come before each position, [num_positions, num_sources]."""
        rounds, rest = np.divmod(positions, len(self._sources))
        return np.asarray(rounds[:, None] * self.counts + self._before[rest], np.int64)

    def samples_until_repeat(self) -> dict[str, int]:
        """Return after how many samples of the mixture each source that is not a stream is used up."""
        until = {}
        for number, (name, part) in enumerate(zip(self.source_names, self.parts, strict=True)):
            if part.num_samples is not None:
                rounds, rest = divmod(part.num_samples - 1, self.counts[number])
                last = np.flatnonzero(self._sources == number)[rest]
                until[name] = rounds * len(self._sources) + int(last) + 1
        return until

    def prepare(self, first: int, count: int) -> None:
        starts, stops = self.counts_before(np.asarray([first, first + count])).tolist()
        for part, start, stop in zip(self.parts, starts, stops, strict=True):
            part.prepare(start, stop - start)

    def sample(self, position: int) -> Sample:
        source = int(self._sources[position % len(self._sources)])
        return self.parts[source].sample(int(self.counts_before(np.asarray([position]))[0, source]))

    def describe(self, positions: Iterable[int]) -> str:
        given = np.asarray([*positions])
        sources, inner = self.sources_of(given), self.counts_before(given)
        of_each = {number: inner[sources == number, number] for number in np.unique(sources)}
        return ", ".join(f"{self.source_names[n]} {self.parts[n].describe(chosen)}" for n, chosen in of_each.items())

    def figures(self, num_samples: int) -> dict[str, Any]:
        sources: dict[str, dict[str, Any]] = {}
        for (name, part, samples), count in zip(self._parts_after(num_samples), self.counts, strict=True):
            sources[name] = {"share": count / sum(self.counts), "samples": samples}
            if part.num_samples is None:
                stream = part.figures(samples)["stream"]
                sources[name] |= {"epochs": stream.pop("epochs"), "stream": stream}
            else:
                sources[name]["epochs"] = round(samples / part.num_samples, 4)
        return {"sources": sources}

    def state_dict(self, num_samples: int) -> dict[str, Any] | None:
        states = {name: part.state_dict(samples) for name, part, samples in self._parts_after(num_samples)}
        return {"sources": states} if any(state is not None for state in states.values()) else None

    def describe_progress(self, num_samples: int, state: dict[str, Any] | None) -> str:
        given = self._states(state)
        return ", ".join(
            f"{name} {format_count(samples, 'sample')} ({part.describe_progress(samples, given.get(name))})"
            for name, part, samples in self._parts_after(num_samples)
        )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        given = self._states(state)
        for name, part in zip(self.source_names, self.parts, strict=True):
            part.load_state_dict(given.get(name))

    def _states(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state of each source; raise CheckpointError if they are those of other sources."""
        given = state.get("sources") if isinstance(state, dict) else None
        if state is not None and (not isinstance(given, dict) or set(given) != set(self.source_names)):
            raise CheckpointError(
                f"trainer.json has no valid position in streamed data of {', '.join(self.source_names)}, so the run "
                f"cannot be resumed."
            )
        return given or {}

    def _parts_after(self, num_samples: int) -> Iterator[tuple[str, Dataset, int]]:
        """Return each name and part, and how many of the first `num_samples` samples are of it."""
        return zip(
            self.source_names, self.parts, self.counts_before(np.asarray([num_samples]))[0].tolist(), strict=True
        )


class Concatenation(MapDataset):
    """The samples of `parts`, by name, one part after the other."""

    def __init__(self, parts: Mapping[str, MapDataset]) -> None:
        self.parts = dict(sorted(parts.items()))
        self.sequence_length = max(part.sequence_length for part in parts.values())

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def sources(self) -> list[SourceDataset]:
        return [source for part in self.parts.values() for source in part.sources]

    def with_sources(self, sources: Sequence[SourceDataset]) -> Concatenation:
        given = iter(sources)
        return Concatenation(
            {name: part.with_sources(list(islice(given, len(part.sources)))) for name, part in self.parts.items()}
        )

    def sample(self, index: int, epoch: int = 0) -> Sample:
        for part in self.parts.values():
            if index < len(part):
                return part.sample(index, epoch)
            index -= len(part)
        raise IndexError(f"sample {index + len(self)} of {len(self)}")

    def head(self, num_samples: int | None) -> Self:
        """Return the first samples of each part, in proportion to its size; one at least, if there are that many."""
        if num_samples is None or num_samples >= len(self):
            return self
        least = int(num_samples >= len(self.parts))
        left, beyond = num_samples - least * len(self.parts), [len(part) - least for part in self.parts.values()]
        ends = np.cumsum(beyond) * left // max(sum(beyond), 1)
        sizes = (np.diff(ends, prepend=0) + least).tolist()
        return type(self)(
            {name: part.head(size) for (name, part), size in zip(self.parts.items(), sizes, strict=True) if size}
        )


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source, so that sources of the same size have different orders."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())
