"""Work divided among a few threads; system calls release the interpreter's lock."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

NUM_THREADS = 2
T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], object], items: Sequence[T]) -> None:
    """Divide `items` among NUM_THREADS calls of `work`, each in a thread of its own.

    Args:
        work: Takes an iterator of items; each item goes to the first call that asks for one.
        items: The items.

    Raises:
        Exception: The first error of `work`; the other calls then get no more items.
    """
    left = deque(items)

    def take() -> Iterator[T]:
        with suppress(IndexError):
            while True:
                yield left.popleft()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(work, take()) for _ in range(min(NUM_THREADS, len(items)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            left.clear()
    for future in futures:
        future.result()
