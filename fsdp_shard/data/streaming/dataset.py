"""Samples of a source that is read while training: nothing is read or tokenized ahead of need, and no length is known.

Rows are taken in blocks of `data.shuffle_buffer`, and each block in an order that follows from (seed, epoch, block). So
where a run stands is the place of its block's first row, and the tokens that the block before left over: the rest of
the buffer is read again, and comes out as it did. Every rank goes through all of it, which is why the samples are the
same on any number of ranks. What becomes of the rows of a block is in `stream_samples.py`. Knows no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.collate import merge
from fsdp_shard.data.samples.protocol import Dataset, HeldOut
from fsdp_shard.data.samples.windows import NO_WINDOW, Batch
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.row_stream import RowStream
from fsdp_shard.data.streaming.samples import Counts, Maker
from fsdp_shard.errors import CheckpointError, DataError


@dataclass(frozen=True)
class StreamPlace:
    """Where a block begins: its number in its epoch, the place of its first row (None: the epoch's beginning), the
    number of its first sample, the tokens that are left over from the block before, the counts of all before it.

    `used_before` is how many rows had given something when the epoch began.
    """

    epoch: int = 0
    block: int = 0
    rows: Any = None
    first: int = 0
    carry: list[int] = field(default_factory=list)
    used_before: int = 0
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def parse(cls, values: Any, what: str) -> StreamPlace:
        """From the JSON of `asdict`; raises CheckpointError, naming `what`, for anything else."""
        try:
            place = cls(**{**values, "counts": Counts(**values["counts"])})
            numbers = [
                place.epoch,
                place.block,
                place.first,
                place.used_before,
                *place.carry,
                *asdict(place.counts).values(),
            ]
            if set(values) == {member.name for member in fields(cls)} and all(
                isinstance(number, int) and number >= 0 for number in numbers
            ):
                return place
        except (TypeError, KeyError):
            pass
        raise CheckpointError(f"{what} has no place in streamed data, so it cannot be resumed from.")


class Streamed(ABC):
    """Samples numbered as they are trained by `seed`. They are given in order: a number may not lie before the block of
    the last.

    `identity` covers names, sizes and beginnings of the files, and all that decides what is made of them.
    """

    def __init__(self, seed: int, identity: str, sequence_length: int) -> None:
        self._seed, self.identity, self.sequence_length = seed, identity, sequence_length

    def __len__(self) -> int:
        raise AssertionError("a stream has no length")

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        assert seed == self._seed, "the order was made for another seed"
        return np.arange(first, first + count)

    @abstractmethod
    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch: ...

    @property
    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Where the block of the last sample begins; JSON."""

    @abstractmethod
    def go_to(self, place: Any, what: str = "trainer.json") -> None:
        """Go on from a `place`; None is the beginning. CheckpointError, naming `what`, where there is no such place."""

    @abstractmethod
    def read_to(self, num_samples: int) -> None:
        """Bring `place` and all counts to where the first `num_samples` were given, whoever asked for them."""


class StreamDataset(Streamed):
    """The samples of one source."""

    def __init__(self, rows: RowStream, maker: Maker, buffer: int, seed: int, identity: str) -> None:
        super().__init__(seed, identity, maker.sequence_length)
        self._rows, self._maker, self._buffer = rows, maker, buffer
        self._samples: list[tuple[HeldOut, int]] = []
        self.go_to(None)

    @property
    def place(self) -> dict[str, Any]:
        return asdict(self._at)

    def go_to(self, place: Any, what: str = "trainer.json") -> None:
        self._at = StreamPlace() if place is None else StreamPlace.parse(place, what)
        self._counts, self._has_begun = replace(self._at.counts), False
        self._reading: Iterator[Any] | None = None

    def read_to(self, num_samples: int) -> None:
        if num_samples > self._at.first:
            self._sample(num_samples - 1)

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        assert NO_WINDOW not in list(indices), "an evaluation reads no stream"
        samples = [self._sample(int(index)) for index in indices]
        return merge([(np.asarray([row]), part.batch([inner])) for row, (part, inner) in enumerate(samples)])

    def seen(self) -> dict[str, int]:
        """What was read up to the last sample, for people: whole epochs, and counts over all of them."""
        return {"epochs": self._at.epoch, **asdict(self._counts)}

    def _sample(self, index: int) -> tuple[HeldOut, int]:
        assert index >= self._at.first, "a stream does not go back"
        if not self._has_begun:
            self._begin()
        while index - self._at.first >= len(self._samples):
            part = next(self._parts, None)
            if part is None:
                self._next_block()
            else:
                self._samples += [(part, int(inner)) for inner in self._maker.order(part, self._shuffled)]
        return self._samples[index - self._at.first]

    def _begin(self) -> None:
        """Read the rows of the block that `_at` is the place of; they are tokenized when samples are asked for."""
        at = self._at
        if self._reading is None:
            self._reading = self._rows.rows(self._maker.columns, at.epoch, at.rows)
        rows: list[Row] = []
        self._after = at.rows
        for row, after in islice(self._reading, self._buffer):
            rows.append(row)
            if len(rows) == self._buffer:
                self._after = after()
        self._is_last = len(rows) < self._buffer
        self._shuffled = _Shuffled(self._seed, at.epoch, at.block, at.first, self._buffer > 1)
        self._counts = replace(at.counts)
        self._samples, self._has_begun = [], True
        self._carry = list(at.carry)
        self._parts = self._maker.parts(
            [rows[place] for place in self._shuffled.permutation(len(rows))], self._carry, self._counts, self._shuffled
        )

    def _next_block(self) -> None:
        at, counts = self._at, self._counts
        following = StreamPlace(
            at.epoch, at.block + 1, self._after, at.first + len(self._samples), self._carry, at.used_before, counts
        )
        if self._is_last:
            if counts.used == at.used_before:
                raise DataError(
                    f"{self._rows.name} has nothing to train on: none of its rows has a word to predict in its first "
                    f"data.sequence_length={self.sequence_length} tokens."
                )
            following = replace(following, epoch=at.epoch + 1, block=0, rows=None, used_before=counts.used)
            self._reading = None
        self._at = following
        self._begin()


@dataclass(frozen=True)
class _Shuffled:
    """The seeded orders of one block, the number of whose first sample is `first`."""

    seed: int
    epoch: int
    block: int
    first: int
    is_on: bool

    def permutation(self, size: int, purpose: int = 0) -> list[int]:
        if not self.is_on:
            return list(range(size))
        keys = np.random.Philox(np.random.SeedSequence([self.seed, self.epoch, self.block, purpose])).random_raw(size)
        return [int(place) for place in np.argsort(keys, kind="stable")]


def place_in(dataset: Dataset, num_samples: int) -> dict[str, Any] | None:
    """What must be kept of a stream to go on after `num_samples`, equal on all ranks; None for data whose place is that
    number.
    """
    if not isinstance(dataset, Streamed):
        return None
    dataset.read_to(num_samples)  # a rank asks for its own samples only, which may all be of one source
    return dataset.place


def go_to(dataset: Dataset, place: dict[str, Any] | None) -> None:
    """Have a stream go on from what `place_in` gave; other data goes on by itself."""
    if isinstance(dataset, Streamed):
        dataset.go_to(place)
