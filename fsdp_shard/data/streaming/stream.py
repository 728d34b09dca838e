"""Samples of a source that is read during training, in blocks of rows.

Rows are read in blocks of `data.shuffle_buffer`, and (seed, epoch, block) determines the order of training within a
block. The state of a stream is therefore the position of the first row of its block, and the tokens that the block
before left over: a resumed run reads the block again, with the same result. Each row is tokenized on one rank, and all
ranks make the samples of all rows, so samples are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp_shard.data.config import kind_of
from fsdp_shard.data.kinds.kind import ROWS, Tokenizer, ends_in_special
from fsdp_shard.data.kinds.running_text import encoded_kind
from fsdp_shard.data.sample_order import permutation
from fsdp_shard.data.samples.batch import Ints, Sample
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import Dataset, SourceDataset
from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.sources.source import Source, open_source
from fsdp_shard.data.streaming.block_reader import RowBlock, encode_blocks, read_blocks
from fsdp_shard.data.streaming.block_samples import Counts, MakeSamples, RowSamples, TextSamples
from fsdp_shard.data.tokenized.encoder import Encoder
from fsdp_shard.errors import CheckpointError, DataError
from fsdp_shard.utils import json_digest, set_environment

if TYPE_CHECKING:
    import pyarrow

    from fsdp_shard.distributed import Communicator

_FORMAT_VERSION = 2
_COMPARED_VERSION = 2  # of the rule that decides which answers are compared


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
            counts = asdict(state.counts)
            numbers += [*state.carry, *counts.pop("left_out").values(), *counts.values()]
            has_all = set(values) == {member.name for member in fields(cls)}
            if has_all and all(isinstance(number, int) and number >= 0 for number in numbers):
                return state
        except (TypeError, KeyError, AttributeError):
            pass
        raise CheckpointError("trainer.json has no valid position in streamed data, so the run cannot be resumed.")


@dataclass(frozen=True)
class ReadBlock:
    """The samples of a block, each as a dataset and an index; where the block begins, and the counts after it."""

    state: StreamState
    samples: Sequence[tuple[SourceDataset, int]]
    counts: Counts


@dataclass(eq=False)
class StreamDataset(Dataset):
    """The samples of one source, read in the order of training.

    `state_dict` and `figures` accept samples that are ready: those of the preceding `prepare` call, or the next ones.

    Attributes:
        source: The rows.
        encoder: Tokenizes the rows.
        make_samples: Makes the samples of a block.
        factory: Its settings; the seed is that of the order of files and rows.
        ranks: The ranks that train, with a group on the CPU; None means this process alone.
        lock: Held while rows are tokenized: the streams of a mixture share a tokenizer, each in its own thread.
    """

    source: Source
    encoder: Encoder
    make_samples: MakeSamples
    factory: SampleFactory
    ranks: Communicator | None
    lock: Lock

    def __post_init__(self) -> None:
        config, task = self.factory.config, self.factory.task.name
        self.num_samples, self.sequence_length, self._buffer = None, config.window_length, config.shuffle_buffer
        names = ("sequence_length", "packing", "shuffle_buffer", "target_length", "mask_fraction")
        kept, kind = [getattr(config, name) for name in names], kind_of(config, task)
        shape = [] if self.factory.task.samples == ROWS else [self.factory.task.samples, _COMPARED_VERSION]
        parts = [_FORMAT_VERSION, kept, task, *shape, self.source.stream_fingerprint()]
        # The identity covers names, sizes and first bytes of the files, and everything that determines the samples.
        self.identity = f"stream:{json_digest([*parts, *Encoder(kind, self.encoder.tokenizer).fingerprint()])}"
        self.load_state_dict(None)

    @property
    def summary(self) -> str:
        order = f"each {self._buffer} rows shuffled" if self._buffer > 1 else "its rows in order"
        return f"{self.source.name} is streamed, {order}"

    def first_examples(self, num_rows: int) -> list[tuple[list[int], list[bool]]]:
        """Return token ids of the first rows, and whether each is predicted; raises DataError for an unusable row."""
        rows = list(islice(self.source.rows(self.encoder.kind.columns), num_rows))
        with set_environment({"TOKENIZERS_PARALLELISM": "false"}):  # processes that are forked later lack threads
            encoded = self.encoder.kind.encode(rows, self.encoder.tokenizer)
        return [(one.ids, one.predicted) for one in chain.from_iterable(encoded)]

    def describe_progress(self, num_samples: int, state: dict[str, Any] | None) -> str:
        now = StreamState() if state is None else StreamState.parse(state)
        return f"stream at epoch {now.epoch}, block {now.block}, row {now.counts.rows:,}"

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        state = self._at(num_samples)[0]
        return asdict(state) | {"counts": state.counts.figures()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._next = StreamState() if state is None else StreamState.parse(state)
        self._blocks = list[ReadBlock]()
        self._reading: Iterator[RowBlock[pyarrow.Table]] | None = None

    def figures(self, num_samples: int) -> dict[str, Any]:
        state, counts = self._at(num_samples)
        return {"stream": {"epochs": state.epoch, **counts.figures()}}

    def prepare(self, first: int, count: int) -> None:
        self._blocks = [block for block in self._blocks if block.state.first + len(block.samples) >= first - count]
        while self._next.first < first + count:
            self._read_block()

    def sample(self, position: int) -> Sample:
        assert self.ranks is None or position < self._next.first, "ranks read together, in prepare()"
        block = self._block_of(position)
        dataset, index = block.samples[position - block.state.first]
        return dataset.sample(index)

    def _at(self, num_samples: int) -> tuple[StreamState, Counts]:
        """Return where the block with the last of `num_samples` samples begins, and the counts after it."""
        oldest = self._blocks[0].state if self._blocks else self._next
        if num_samples <= oldest.first:
            return oldest, oldest.counts
        block = self._block_of(num_samples - 1)
        return block.state, block.counts

    def _block_of(self, position: int) -> ReadBlock:
        if position >= self._next.first:
            self.prepare(position, 1)
        found = [block for block in self._blocks if block.state.first <= position]
        assert found, "a stream does not go back"
        return found[-1]

    def _encode(self, rows: list[Row]) -> pyarrow.Table:
        with self.lock:
            return self.encoder(rows)

    def _read_block(self) -> None:
        """Read the block at `_next` and make its samples."""
        from pyarrow import compute

        state = self._next
        if self._reading is None:
            columns, file_seed = self.encoder.kind.columns, self.factory.seed if self._buffer > 1 else None
            blocks = read_blocks(self.source, columns, self._buffer, file_seed, state.epoch, state.rows)
            workers = self.factory.config.workers
            self._reading = encode_blocks(self.source.name, blocks, self._encode, self.ranks, workers)
        block = next(self._reading)
        table, leftover = block.rows.take(self._permutation(len(block.rows))), list(state.carry)
        dropped = int(np.count_nonzero(compute.list_value_length(table["lengths"]).to_numpy() == 0))
        counts = replace(state.counts, rows=state.counts.rows + len(table), dropped=state.counts.dropped + dropped)
        parts = self.make_samples(table, leftover, counts, state.first)
        if self.factory.config.packing:  # which sorts windows
            samples = [(part, int(inner)) for part in parts for inner in self._permutation(len(part), purpose=1)]
        else:
            samples = [(part, inner) for part in parts for inner in range(len(part))]
        if samples:
            self._blocks.append(ReadBlock(state, samples, counts))
        state = replace(state, first=state.first + len(samples), carry=leftover, counts=counts)
        self._next = replace(state, block=state.block + 1, rows=block.after)
        if block.is_last:
            if counts.used == state.used_before:
                lacking = "a token to predict" if self.factory.task.samples == ROWS else "answers to compare"
                raise DataError(
                    f"{self.source.name} has nothing to train on: no row has {lacking} among its first "
                    f"data.sequence_length={self.sequence_length} tokens."
                )
            self._next = replace(state, epoch=state.epoch + 1, block=0, rows=None, used_before=counts.used)

    def _permutation(self, size: int, purpose: int = 0) -> Ints:
        """Return the seeded order of `size` items of the block at `_next`, a different one for each `purpose`."""
        if self._buffer == 1:
            return np.arange(size)
        return permutation(size, self.factory.seed, self._next.epoch, self._next.block, purpose)


def open_stream(
    factory: SampleFactory, tokenizer: Tokenizer, lock: Lock, ranks: Communicator | None = None
) -> StreamDataset:
    """Open the samples of one source from their beginning.

    Args:
        factory: Makes samples by the settings of the source; its seed also determines the order.
        tokenizer: The tokenizer. Threads use it, so only streams with the same lock may use it, too.
        lock: Held while rows are tokenized.
        ranks: The ranks that train, with a group on the CPU; None means this process alone.

    Raises:
        DataError: The source cannot be read, or the tokenizer lacks a token.
    """
    config, task = factory.config, factory.task.name
    source, kind = open_source(config, held_out=False), encoded_kind(config, task, tokenizer)
    source.check_stream()
    kind.check_tokenizer(tokenizer)
    kind.check_num_rows(None, source.name)
    make_samples: MakeSamples = RowSamples(factory, ends_in_special(tokenizer))
    if kind.stream_separators is not None:
        make_samples = TextSamples(factory, len(kind.stream_separators))
    return StreamDataset(source, Encoder(kind, tokenizer), make_samples, factory, ranks, lock)
