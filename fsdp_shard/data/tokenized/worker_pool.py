"""A function over batches, in this process or in several, with results in the order of the batches.

The results are the same with any number of workers, as the batches are. Knows nothing of tokens.
"""

from __future__ import annotations

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

_AHEAD = 3  # batches that wait for each worker: enough to keep it busy, few enough to hold

_function: Callable[[Any], Any] | None = None


def ordered_map(function: Callable[[T], R], batches: Iterable[T], num_workers: int) -> Iterator[R]:
    """`function` of each batch, in order. With one worker it runs here; else in processes forked for it.

    What `function` raises is raised here. Raises DataError when a worker is killed.
    """
    if num_workers == 1:
        yield from map(function, batches)
        return
    global _function
    _function = function  # forked workers have it: a tokenizer takes longer to send than to use
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(num_workers, mp_context=fork, initializer=_begin_worker) as pool:
            waiting: deque[Future[R]] = deque()
            for batch in batches:
                waiting.append(pool.submit(_call, batch))
                if len(waiting) >= num_workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"One of the data.workers={num_workers} processes that tokenize was killed, perhaps for its memory; use "
            f"fewer."
        ) from error
    finally:
        _function = None


def _begin_worker() -> None:
    # Each worker is one core's worth: the tokenizer's threads do not survive a fork, and would outnumber the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _call(batch: Any) -> Any:
    assert _function is not None
    return _function(batch)
