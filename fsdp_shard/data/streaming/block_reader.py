"""The blocks of a stream: every rank reads them, one rank tokenizes each row, and the ranks exchange the results.

A thread, or the processes of a `torch.utils.data.DataLoader`, read and tokenize ahead of need.
These run no collectives: the exchange happens when a block is requested, which all ranks do at the same sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import parent_process
from multiprocessing.connection import wait
from signal import SIGKILL
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import DataError
from fsdp_shard.utils import first_line, set_environment

if TYPE_CHECKING:
    import pyarrow

    from fsdp_shard.distributed import Communicator

T = TypeVar("T")
Encode: TypeAlias = "Callable[[list[Row]], pyarrow.Table]"

# Characters tokenized in one call, and exchanged together if blocks are smaller: enough for the tokenizer's threads and
# to be worth a collective, few enough for memory. A row counts as at least 1/64 of it.
_CHARACTERS_AT_ONCE = 1 << 20
_CHARACTERS_OF_A_ROW = _CHARACTERS_AT_ONCE >> 6


class RowBlock(NamedTuple, Generic[T]):
    """Rows of an epoch, the position after them, and whether they end the epoch."""

    rows: T
    after: Any
    is_last: bool


def read_blocks(
    source: Source, columns: tuple[str, ...], size: int, seed: int | None, epoch: int, start: Any
) -> Iterator[RowBlock[list[Row]]]:
    """Read blocks of `size` rows, epoch after epoch; the last block of an epoch has fewer rows, or none.

    Args:
        source: The rows.
        columns: The required columns.
        size: Rows per block.
        seed: Seed of the file order; None sorts files by name.
        epoch: Epoch number of the first block.
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
            yield RowBlock(rows, None if is_last else start, is_last)
        epoch, start = epoch + 1, None


def encode_blocks(
    name: str, blocks: Iterator[RowBlock[list[Row]]], encode: Encode, ranks: Communicator | None, num_workers: int = 1
) -> Iterator[RowBlock[pyarrow.Table]]:
    """Tokenize blocks over the ranks, ahead of need. Requesting a block is a collective.

    Args:
        name: Setting and value of the source, for messages.
        blocks: The blocks, the same on every rank.
        encode: Returns the table of some rows; called in a thread or in processes.
        ranks: The ranks that request these blocks, with a CPU group; None for only this process.
        num_workers: Processes of this rank that read and tokenize; 1 for a thread, which is one exchange ahead.

    Raises:
        DataError: On all ranks: a row cannot be read or used, or ranks read different rows.
    """
    import pyarrow

    own = _Parts(blocks, encode, *((0, 1) if ranks is None else (ranks.rank, ranks.world_size)))
    ahead = _in_thread(iter(own)) if num_workers <= 1 else _in_processes(own, num_workers)
    while True:
        parts = [next(ahead)] if ranks is None else ranks.all_gather_object(run_on_all(ranks, lambda: next(ahead)))
        read = parts[0][0]
        if any(others != read for others, _ in parts):
            raise DataError(f"{name} differs between the machines of this run. Give all of them the same files.")
        rows = pyarrow.concat_tables([table for _, table in parts])
        for size, after, is_last in read:
            yield RowBlock(rows[:size], after, is_last)
            rows = rows[size:]


# The number of rows of each block, and the rows of one rank.
_Part: TypeAlias = "tuple[list[RowBlock[int]], pyarrow.Table]"


@dataclass(frozen=True)
class _Parts:
    """One rank's part of each exchange, a range of its rows.

    With several processes, each reads all blocks and tokenizes every n-th exchange: a DataLoader takes one from each in
    order.
    """

    blocks: Iterator[RowBlock[list[Row]]]
    encode: Encode
    rank: int
    num_ranks: int

    def __iter__(self, first: int = 0, step: int = 1) -> Iterator[_Part]:
        batches = _batched(self.blocks, lambda block: sum(map(_size, block.rows), _CHARACTERS_OF_A_ROW))
        return (self._encode(blocks) for blocks in islice(batches, first, None, step))

    def _encode(self, blocks: list[RowBlock[list[Row]]]) -> _Part:
        import pyarrow

        rows = list(chain.from_iterable(block.rows for block in blocks))
        own = rows[len(rows) * self.rank // self.num_ranks : len(rows) * (self.rank + 1) // self.num_ranks]
        tables = [self.encode([])]  # this rank may have none
        for some in _batched(own, _size):
            _end_with_main_thread()
            tables.append(self.encode(some))
        return [RowBlock(len(rows), after, is_last) for rows, after, is_last in blocks], pyarrow.concat_tables(tables)


def _in_thread(parts: Iterator[_Part]) -> Iterator[_Part]:
    """Prepare each part in a thread while the previous one is used.

    The thread is not a daemon: Python before 3.14 aborts if it exits while a daemon thread is in native code.
    """

    def start() -> Future[_Part]:
        future = Future[_Part]()

        def run() -> None:
            try:
                future.set_result(next(parts))
            except Exception as error:
                future.set_exception(error)

        Thread(target=run, name="tokenize ahead").start()
        return future

    ahead = start()
    while True:
        part = ahead.result()
        ahead = start()
        yield part


def _in_processes(parts: _Parts, num_workers: int) -> Iterator[_Part]:
    """Prepare parts in processes, each two parts ahead."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Ahead(IterableDataset[Any]):
        def __iter__(self) -> Iterator[_Part | Exception]:
            worker: Any = get_worker_info()
            try:
                yield from parts.__iter__(worker.id, num_workers)
            except Exception as error:  # a DataLoader would add its traceback to the message
                yield error

    with set_environment({"TOKENIZERS_PARALLELISM": "false"}):  # processes suffice, and they are forked
        ahead = iter(DataLoader(Ahead(), batch_size=None, num_workers=num_workers, worker_init_fn=_end_with_parent))
    while True:
        try:
            part = next(ahead)
        except RuntimeError as error:
            raise DataError(
                f"One of the data.workers={num_workers} processes that read and tokenize has died, possibly by the "
                f"out-of-memory killer ({first_line(error)}); reduce it."
            ) from error
        if isinstance(part, Exception):
            raise part
        yield part


def _end_with_parent(_: int) -> None:
    """End this worker when its rank is killed.

    A DataLoader worker notices that, but then waits forever until its last part is read.
    """
    parent = parent_process()
    assert parent is not None

    def run() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), SIGKILL)

    Thread(target=run, name="end with parent", daemon=True).start()


def _end_with_main_thread() -> None:
    if not main_thread().is_alive():
        raise SystemExit


def _size(row: Row) -> int:
    return _CHARACTERS_OF_A_ROW + sum(len(value) for value in row.values.values() if isinstance(value, str))


def _batched(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items; each ends when the sum of their sizes reaches `_CHARACTERS_AT_ONCE`."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
