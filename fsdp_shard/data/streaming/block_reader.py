"""The blocks of a stream: every rank reads them, each row is tokenized on one rank, and the ranks exchange the results.

A thread reads and tokenizes ahead while the samples before are trained. It makes no collective: the exchange is where a
block is asked for, which all ranks do at the same sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from fsdp_shard.data.kinds.kind import Example
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from fsdp_shard.distributed import Communicator

T = TypeVar("T")
Rows: TypeAlias = "Sequence[list[EncodedExample]]"  # the examples of each row; none for one with nothing to learn
Encode: TypeAlias = Callable[[list[Row]], list[list[Example]]]

# What is tokenized in one call, and exchanged at once if blocks are smaller: enough for the tokenizer's threads and to
# be worth a collective, few enough for the memory. A row counts as at least 1/64 of it.
_CHARACTERS_AT_ONCE = 1 << 20
_CHARACTERS_OF_A_ROW = _CHARACTERS_AT_ONCE >> 6


class EncodedExample(NamedTuple):
    """An example in few bytes: its token ids, int32; whether each is predicted, uint8, nothing for running text; its
    class, if it has one.
    """

    tokens: bytes
    predicted: bytes
    label: str | int | None


class Block(NamedTuple, Generic[T]):
    """Rows of an epoch, the position after them, and whether the epoch ends with them."""

    rows: T
    after: Any
    is_last: bool


def read_blocks(
    source: Source, columns: tuple[str, ...], size: int, seed: int | None, epoch: int, start: Any
) -> Iterator[Block[list[Row]]]:
    """Read blocks of `size` rows, one epoch after the other; the last of an epoch has fewer, or none.

    Args:
        source: The rows.
        columns: The columns that are needed.
        size: Rows in a block.
        seed: Seed of the order of the files; None keeps that of their names.
        epoch: Number of the epoch of the first block.
        start: Position of its first row; None is the beginning of the epoch.
    """
    while True:
        reading, is_last = source.read(columns, start, epoch, seed), False
        while not is_last:
            rows = list[Row]()
            for row, after in islice(reading, size):
                _end_with_main_thread()
                rows.append(row)
                if len(rows) == size:
                    start = after()
            is_last = len(rows) < size
            yield Block(rows, None if is_last else start, is_last)
        epoch, start = epoch + 1, None


def encode_blocks(
    name: str, blocks: Iterator[Block[list[Row]]], encode: Encode, ranks: Communicator | None
) -> Iterator[Block[Rows]]:
    """Tokenize blocks over the ranks, one exchange ahead of need. To ask for a block is a collective.

    Args:
        name: Setting and value of the source, for messages.
        blocks: The blocks, the same on every rank.
        encode: Returns the examples of each row; called in a thread.
        ranks: The ranks that ask for these blocks, with a group on the CPU; None is this process alone.

    Raises:
        DataError: On all ranks: a row cannot be read or used, or ranks read different rows.
    """
    batches = _batched(blocks, lambda block: sum(map(_size, block.rows), _CHARACTERS_OF_A_ROW), _CHARACTERS_AT_ONCE)
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    work = partial(_encode_part, batches, encode, rank, num_ranks)
    ahead = _start(work)
    while True:
        parts = [ahead.result()] if ranks is None else ranks.all_gather_object(run_on_all(ranks, ahead.result))
        ahead = _start(work)
        read = parts[0][0]
        if any(others != read for others, _ in parts):
            raise DataError(f"{name} differs between the machines of this run. Give all of them the same files.")
        encoded = chain.from_iterable(rows for _, rows in parts)
        for size, after, is_last in read:
            yield Block(list(islice(encoded, size)), after, is_last)


def _encode_part(batches: Iterator[list[Block[list[Row]]]], encode: Encode, rank: int, num_ranks: int) -> _Part:
    """Read the next blocks, and tokenize the part of one rank, which is a range of their rows."""
    blocks = next(batches)
    rows = list(chain.from_iterable(block.rows for block in blocks))
    encoded = list[list[EncodedExample]]()
    own = rows[len(rows) * rank // num_ranks : len(rows) * (rank + 1) // num_ranks]
    for some in _batched(own, _size, _CHARACTERS_AT_ONCE):
        _end_with_main_thread()
        encoded += [[_pack(example) for example in row] for row in encode(some)]
    return [Block(len(rows), after, is_last) for rows, after, is_last in blocks], encoded


def _pack(example: Example) -> EncodedExample:
    return EncodedExample(np.asarray(example.ids, np.int32).tobytes(), bytes(example.predicted), example.label)


_Part: TypeAlias = tuple[list[Block[int]], Rows]  # the number of rows of each block, and the rows of one rank


def _start(work: Callable[[], _Part]) -> Future[_Part]:
    """Work in a thread. It is no daemon, as Python before 3.14 aborts when it ends while one is in native code."""
    future = Future[_Part]()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, name="tokenize ahead").start()
    return future


def _end_with_main_thread() -> None:
    if not main_thread().is_alive():
        raise SystemExit


def _size(row: Row) -> int:
    return _CHARACTERS_OF_A_ROW + sum(len(value) for value in row.values.values() if isinstance(value, str))


def _batched(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items; each ends when the sum of their sizes reaches `limit`."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
