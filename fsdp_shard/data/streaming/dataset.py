"""Samples of sources that are read while training, by blocks of rows.

Rows are read in blocks of `data.shuffle_buffer`, and each block is trained in an order that follows from (seed, epoch,
block). So the state of a stream is the position of the first row of its block, and the tokens that the block before
left over: the rest of the block is read again, with the same result. Each row is tokenized on one rank, and every rank
makes the samples of all of them, which is why they are the same on any number of ranks. A mixture has one stream for
each source, and their states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp_shard.data.config import kind_of
from fsdp_shard.data.kinds.kind import Tokenizer
from fsdp_shard.data.sample_order import permutation
from fsdp_shard.data.samples import mixture_schedule as schedule
from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, merge
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import Dataset, MapDataset
from fsdp_shard.data.sources.source import Source, open_source
from fsdp_shard.data.streaming.block_reader import Block, Rows, encode_blocks, read_blocks
from fsdp_shard.data.streaming.block_samples import Counts, RowBlocks, block_tokenizer
from fsdp_shard.data.tokenized.cache_directory import cache_key
from fsdp_shard.data.tokenized.token_cache import tokenizer_state
from fsdp_shard.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from fsdp_shard.distributed import Communicator

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
    """Samples with indices in the order of training by `seed`, which are read in that order.

    On several ranks `order` is a collective that makes the samples ready; those of the call before stay. So are
    `state_dict` and `figures` for samples that were not ready yet.

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
        self.read(first, count)
        return np.arange(first, first + count)

    def batch(self, indices: Indices) -> Batch:
        assert NO_WINDOW not in list(indices), "a stream is not evaluated"
        samples = [self.sample(int(index)) for index in indices]
        return merge([(np.asarray([row]), part.batch([inner])) for row, (part, inner) in enumerate(samples)])

    @abstractmethod
    def read(self, first: int, count: int) -> None:
        """Make samples `first` to `first + count - 1` ready; a collective."""

    @abstractmethod
    def sample(self, index: int) -> tuple[MapDataset, int]:
        """Return the dataset that has the sample, and its index there."""


@dataclass(frozen=True)
class ReadBlock:
    """The samples of a block, each in a dataset and with its index there; where it begins, and the counts after it."""

    state: StreamState
    samples: Sequence[tuple[MapDataset, int]]
    counts: Counts


class StreamDataset(StreamedDataset):
    """The samples of one source.

    Args:
        source: The rows.
        tokenizer: What makes samples of blocks of rows.
        seed: Seed of the order of files and rows.
        identity: Identity of the samples.
        ranks: The ranks that train, with a group on the CPU; None is this process alone.
    """

    def __init__(
        self, source: Source, tokenizer: RowBlocks, seed: int, identity: str, ranks: Communicator | None
    ) -> None:
        config = tokenizer.factory.config
        super().__init__(seed, identity, config.sequence_length)
        self._source, self._tokenizer, self._ranks, self._buffer = source, tokenizer, ranks, config.shuffle_buffer
        self.load_state_dict(None)

    @property
    def summary(self) -> str:
        order = f"each {self._buffer} rows shuffled" if self._buffer > 1 else "its rows in order"
        return f"{self._source.name} is streamed, {order}"

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        return asdict(self._at(num_samples)[0])

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._next = StreamState() if state is None else StreamState.parse(state)
        self._blocks = list[ReadBlock]()
        self._reading: Iterator[Block[Rows]] | None = None

    def figures(self, num_samples: int) -> dict[str, Any]:
        state, counts = self._at(num_samples)
        return {"stream": {"epochs": state.epoch, **asdict(counts)}}

    def read(self, first: int, count: int) -> None:
        self._blocks = [block for block in self._blocks if block.state.first + len(block.samples) >= first - count]
        while self._next.first < first + count:
            self._read_block()

    def sample(self, index: int) -> tuple[MapDataset, int]:
        assert self._ranks is None or index < self._next.first, "ranks read together, in order()"
        block = self._block_of(index)
        return block.samples[index - block.state.first]

    def _at(self, num_samples: int) -> tuple[StreamState, Counts]:
        """Return where the block of the last of `num_samples` samples begins, and the counts after it."""
        oldest = self._blocks[0].state if self._blocks else self._next
        if num_samples <= oldest.first:
            return oldest, oldest.counts
        block = self._block_of(num_samples - 1)
        return block.state, block.counts

    def _block_of(self, index: int) -> ReadBlock:
        if index >= self._next.first:
            self.read(index, 1)
        found = [block for block in self._blocks if block.state.first <= index]
        assert found, "a stream does not go back"
        return found[-1]

    def _read_block(self) -> None:
        """Read the block at `_next`, and make its samples."""
        state = self._next
        if self._reading is None:
            columns, file_seed = self._tokenizer.columns, self._seed if self._buffer > 1 else None
            blocks = read_blocks(self._source, columns, self._buffer, file_seed, state.epoch, state.rows)
            self._reading = encode_blocks(self._source.name, blocks, self._tokenizer.encode, self._ranks)
        block = next(self._reading)
        rows, carry = [block.rows[index] for index in self._permutation(len(block.rows))], list(state.carry)
        dropped = sum(not row for row in rows)
        counts = replace(state.counts, rows=state.counts.rows + len(rows), dropped=state.counts.dropped + dropped)
        parts = self._tokenizer.parts(rows, carry, counts, state.first)
        if self._tokenizer.factory.config.packing:  # which sorts windows
            samples = [(part, int(inner)) for part in parts for inner in self._permutation(len(part), purpose=1)]
        else:
            samples = [(part, inner) for part in parts for inner in range(len(part))]
        if samples:
            self._blocks.append(ReadBlock(state, samples, counts))
        state = replace(state, first=state.first + len(samples), carry=carry, counts=counts)
        self._next = replace(state, block=state.block + 1, rows=block.after)
        if block.is_last:
            if counts.used == state.used_before:
                raise DataError(
                    f"{self._source.name} has nothing to train on: no row has a token to predict among its first "
                    f"data.sequence_length={self.sequence_length} tokens."
                )
            self._next = replace(state, epoch=state.epoch + 1, block=0, rows=None, used_before=counts.used)

    def _permutation(self, size: int, purpose: int = 0) -> Ints:
        """Return the seeded order of `size` items of the block at `_next`, another one for each `purpose`."""
        if self._buffer == 1:
            return np.arange(size)
        return permutation(size, self._seed, self._next.epoch, self._next.block, purpose)


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
        sources = schedule.proportions(self.names, self.counts, num_samples)
        for name, part, count in zip(self.names, self.parts, self._samples_read(num_samples), strict=True):
            stream = part.figures(count)["stream"]
            sources[name] |= {"epochs": stream.pop("epochs"), "stream": stream}
        return {"sources": sources}

    def read(self, first: int, count: int) -> None:
        until = self._samples_read(first + count)
        for part, before, after in zip(self.parts, self._samples_read(first), until, strict=True):
            part.read(before, after - before)

    def sample(self, index: int) -> tuple[MapDataset, int]:
        number = int(schedule.scheduled_sources(self.counts, index, 1)[0])
        return self.parts[number].sample(self._samples_read(index)[number])

    def _samples_read(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` are of each source."""
        return [int(count) for count in schedule.counts_before(self.counts, num_samples)]


def open_stream(
    factory: SampleFactory, tokenizer: Tokenizer, lock: Lock, ranks: Communicator | None = None
) -> StreamDataset:
    """Open the samples of one source from their beginning.

    Args:
        factory: Makes samples by the settings of the source; its seed is that of the order too.
        tokenizer: The tokenizer. Threads use it, so nothing but streams with the same lock may.
        lock: Is held while rows are tokenized.
        ranks: The ranks that train, with a group on the CPU; None is this process alone.

    Raises:
        DataError: The source cannot be read, or the tokenizer lacks a token.
    """
    config, task = factory.config, factory.task.name
    source = open_source(config, held_out=False)
    source.check_stream()
    blocks = block_tokenizer(factory, tokenizer, lock)
    kept = (config.sequence_length, config.packing, config.shuffle_buffer, config.target_length, config.mask_fraction)
    parts = [_FORMAT_VERSION, kept, task, source.stream_fingerprint(), tokenizer_state(tokenizer)]
    parts += [getattr(tokenizer, "chat_template", None), kind_of(config, task).fingerprint()]
    return StreamDataset(source, blocks, factory.seed, f"stream:{cache_key(parts)}", ranks)
