"""Maps a function over batches, in this process or in several, with results in the order of the batches."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fsdp_shard.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

_PREFETCH = 3  # batches per worker: enough to keep it busy, few enough for the memory

_function: Callable[[Any], Any] | None = None


def ordered_map(function: Callable[[T], R], batches: Iterable[T], num_workers: int) -> Iterator[R]:
    """Apply a function to each batch.

    Args:
        function: The function. It may raise; the error is raised here.
        batches: The batches.
        num_workers: Processes that are forked for it; 1 uses this process.

    Yields:
        The results, in the order of the batches.

    Raises:
        DataError: A worker was killed.
    """
    if num_workers == 1:
        yield from map(function, batches)
        return
    global _function
    _function = function  # workers inherit it: pickling a tokenizer takes longer than using it
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(num_workers, mp_context=fork, initializer=_begin_worker) as pool:
            waiting: deque[Future[R]] = deque()
            for batch in batches:
                waiting.append(pool.submit(_call, batch))
                if len(waiting) >= num_workers * _PREFETCH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"One of the data.workers={num_workers} processes that tokenize was killed, possibly by the out-of-memory "
            f"killer; reduce it."
        ) from error
    finally:
        _function = None


def _begin_worker() -> None:
    # One core per worker: the tokenizer's threads do not survive a fork, and would outnumber the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _call(batch: Any) -> Any:
    assert _function is not None
    return _function(batch)
