"""Work shared by a few threads; system calls release the interpreter's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 2
T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], object], items: Sequence[T]) -> None:
    """Divide `items` among NUM_THREADS calls of `work`; the first exception stops all of them and is raised."""
    left = deque(items)

    def taken() -> Iterator[T]:
        while left:
            try:
                item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            yield item

    def guarded() -> None:
        try:
            work(taken())
        except BaseException:
            left.clear()  # so that the other threads stop
            raise

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(guarded) for _ in range(min(NUM_THREADS, len(items)))]
        try:
            for future in futures:
                future.result()
        finally:
            left.clear()
