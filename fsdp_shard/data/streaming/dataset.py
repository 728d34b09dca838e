"""Samples of sources that are read while training: nothing is read or tokenized ahead of need.

Rows are read in blocks of `data.shuffle_buffer`, and each block is trained in an order that follows from (seed, epoch,
block). So the state of a stream is the position of the first row of its block, and the tokens that the block before
left over: the rest of the block is read again, with the same result. Every rank reads all rows, which is why the
samples are the same on any number of ranks. A mixture has one stream for each source, and their states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from fsdp_shard.data.config import kind_of
from fsdp_shard.data.kinds.kind import Tokenizer
from fsdp_shard.data.samples import mixture_schedule as schedule
from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, merge
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import Dataset, MapDataset
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import Source, open_source
from fsdp_shard.data.streaming.block_samples import BlockOrder, BlockTokenizer, Counts, block_tokenizer
from fsdp_shard.data.tokenized.cache_directory import cache_key
from fsdp_shard.data.tokenized.token_cache import tokenizer_state
from fsdp_shard.errors import CheckpointError, DataError

_FORMAT_VERSION = 2


@dataclass(frozen=True)
class StreamState:
    """Where a block begins.

    Attributes:
        epoch: Number of the epoch.
        block: Number of the block in its epoch.
        rows: Position of the first row of the block; None is the beginning of the epoch.
        first: Index of the first sample of the block.
        carry: Tokens left over from the block before.
        used_before: Examples used before the epoch.
        counts: Counts over all blocks before.
    """

    epoch: int = 0
    block: int = 0
    rows: Any = None
    first: int = 0
    carry: list[int] = field(default_factory=list)
    used_before: int = 0
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def parse(cls, values: Any) -> StreamState:
        """Parse the JSON of `asdict`; raise CheckpointError for anything else."""
        try:
            state = cls(**{**values, "counts": Counts(**values["counts"])})
            numbers = [state.epoch, state.block, state.first, state.used_before]
            numbers += [*state.carry, *asdict(state.counts).values()]
            has_all = set(values) == {member.name for member in fields(cls)}
            if has_all and all(isinstance(number, int) and number >= 0 for number in numbers):
                return state
        except (TypeError, KeyError):
            pass
        raise CheckpointError("trainer.json has no valid position in streamed data, so the run cannot be resumed.")


class StreamedDataset(Dataset):
    """Samples with indices in the order of training by `seed`. They are read in order: an index may not be before the
    block of the last one.

    `identity` covers the names, sizes and first bytes of the files, and everything that decides about the samples.
    """

    num_samples = None

    def __init__(self, seed: int, identity: str, sequence_length: int) -> None:
        self._seed, self._identity, self.sequence_length = seed, identity, sequence_length

    @property
    def identity(self) -> str:
        return self._identity

    def order(self, seed: int, first: int, count: int) -> Ints:
        assert seed == self._seed, "the order was made for another seed"
        return np.arange(first, first + count)

    def batch(self, indices: Indices) -> Batch:
        assert NO_WINDOW not in list(indices), "a stream is not evaluated"
        samples = [self._sample(int(index)) for index in indices]
        return merge([(np.asarray([row]), part.batch([inner])) for row, (part, inner) in enumerate(samples)])

    @abstractmethod
    def _sample(self, index: int) -> tuple[MapDataset, int]:
        """Return the dataset that has the sample, and its index there."""


class StreamDataset(StreamedDataset):
    """The samples of one source.

    Args:
        source: The rows.
        tokenizer: What makes samples of blocks of rows.
        seed: Seed of the order of files and rows.
        identity: Identity of the samples.
    """

    def __init__(self, source: Source, tokenizer: BlockTokenizer, seed: int, identity: str) -> None:
        config = tokenizer.factory.config
        super().__init__(seed, identity, config.sequence_length)
        self._source, self._tokenizer, self._buffer = source, tokenizer, config.shuffle_buffer
        self._samples: list[tuple[MapDataset, int]] = []
        self.load_state_dict(None)

    @property
    def summary(self) -> str:
        order = f"each {self._buffer} rows shuffled" if self._buffer > 1 else "its rows in order"
        return f"{self._source.name} is streamed, {order}"

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        if num_samples > self._state.first:
            self._sample(num_samples - 1)  # a rank asks for its own samples only
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._state = StreamState() if state is None else StreamState.parse(state)
        self._counts, self._has_begun = replace(self._state.counts), False
        self._reading: Iterator[Any] | None = None

    def figures(self, num_samples: int) -> dict[str, Any]:
        return {"stream": {"epochs": self._state.epoch, **asdict(self._counts)}}

    def _sample(self, index: int) -> tuple[MapDataset, int]:
        assert index >= self._state.first, "a stream does not go back"
        if not self._has_begun:
            self._begin_block()
        while index - self._state.first >= len(self._samples):
            part = next(self._parts, None)
            if part is None:
                self._next_block()
            else:
                self._samples += [(part, int(inner)) for inner in self._tokenizer.sample_order(part, self._order)]
        return self._samples[index - self._state.first]

    def _begin_block(self) -> None:
        """Read the rows of the block at `_state`; they are tokenized when samples are asked for."""
        state, is_shuffled = self._state, self._buffer > 1
        if self._reading is None:
            file_seed = self._seed if is_shuffled else None
            self._reading = self._source.read(self._tokenizer.columns, state.rows, state.epoch, file_seed)
        rows: list[Row] = []
        self._after = state.rows
        for row, after in islice(self._reading, self._buffer):
            rows.append(row)
            if len(rows) == self._buffer:
                self._after = after()
        self._is_last = len(rows) < self._buffer
        self._order = BlockOrder(self._seed, state.epoch, state.block, state.first, is_shuffled)
        self._counts, self._carry = replace(state.counts), list(state.carry)
        self._samples, self._has_begun = [], True
        ordered = [rows[position] for position in self._order.permutation(len(rows))]
        self._parts = self._tokenizer.parts(ordered, self._carry, self._counts, self._order)

    def _next_block(self) -> None:
        state, counts = self._state, self._counts
        first = state.first + len(self._samples)
        following = replace(
            state, block=state.block + 1, rows=self._after, first=first, carry=self._carry, counts=counts
        )
        if self._is_last:
            if counts.used == state.used_before:
                raise DataError(
                    f"{self._source.name} has nothing to train on: no row has a token to predict among its first "
                    f"data.sequence_length={self.sequence_length} tokens."
                )
            following = replace(following, epoch=state.epoch + 1, block=0, rows=None, used_before=counts.used)
            self._reading = None
        self._state = following
        self._begin_block()


class StreamMixture(StreamedDataset):
    """The streams of several sources, by their `counts` in every round of samples; each has epochs of its own."""

    def __init__(self, streams: Mapping[str, StreamDataset], counts: Mapping[str, int], seed: int) -> None:
        self.names = tuple(sorted(streams))  # so that the order of the settings does not matter
        self.parts = tuple(streams[name] for name in self.names)
        self.counts = tuple(counts[name] for name in self.names)
        identity = schedule.mixture_identity(self.names, self.counts, (part.identity for part in self.parts))
        super().__init__(seed, identity, max(part.sequence_length for part in self.parts))

    @property
    def summary(self) -> str:
        return "; ".join(part.summary for part in self.parts)

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.names

    def sources_of(self, indices: Ints) -> Ints:
        return np.asarray([schedule.scheduled_sources(self.counts, int(i), 1)[0] for i in indices], np.int64)

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        read = zip(self.names, self.parts, self._samples_read(num_samples), strict=True)
        return {"sources": {name: part.state_dict(count) for name, part, count in read}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        given = state.get("sources") if isinstance(state, dict) else None
        if state is not None and (not isinstance(given, dict) or set(given) != set(self.names)):
            raise CheckpointError(
                f"trainer.json has no valid position in streamed data of {', '.join(self.names)}, so the run cannot be "
                f"resumed."
            )
        for name, part in zip(self.names, self.parts, strict=True):
            part.load_state_dict((given or {}).get(name))

    def figures(self, num_samples: int) -> dict[str, Any]:
        self.state_dict(num_samples)  # so that the counts are equal on all ranks
        sources = schedule.proportions(self.names, self.counts, num_samples)
        for name, part in zip(self.names, self.parts, strict=True):
            stream = part.figures(num_samples)["stream"]
            sources[name] |= {"epochs": stream.pop("epochs"), "stream": stream}
        return {"sources": sources}

    def _sample(self, index: int) -> tuple[MapDataset, int]:
        number = int(schedule.scheduled_sources(self.counts, index, 1)[0])
        return self.parts[number]._sample(self._samples_read(index)[number])

    def _samples_read(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` are of each source."""
        return [int(count) for count in schedule.counts_before(self.counts, num_samples)]


def open_stream(factory: SampleFactory, tokenizer: Tokenizer) -> StreamDataset:
    """Open the samples of one source from their beginning.

    Args:
        factory: Makes samples by the settings of the source; its seed is that of the order too.
        tokenizer: The tokenizer.

    Raises:
        DataError: The source cannot be read, or the tokenizer lacks a token.
    """
    config, task = factory.config, factory.task.name
    source = open_source(config, held_out=False)
    source.check_stream()
    blocks = block_tokenizer(factory, tokenizer)
    kept = (config.sequence_length, config.packing, config.shuffle_buffer, config.target_length, config.mask_fraction)
    parts = [_FORMAT_VERSION, kept, task, source.stream_fingerprint(), tokenizer_state(tokenizer)]
    parts += [getattr(tokenizer, "chat_template", None), kind_of(config, task).fingerprint()]
    return StreamDataset(source, blocks, factory.seed, f"stream:{cache_key(parts)}")
