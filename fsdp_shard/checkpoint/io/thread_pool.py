"""Divides work among a few threads; system calls release the GIL."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import TypeVar

from fsdp_shard.utils import report_progress

NUM_THREADS = 2
T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], object], items: Sequence[T], title: str | None = None) -> None:
    """Divide `items` among NUM_THREADS calls of `work`, each in its own thread.

    Args:
        work: Accepts an iterator of items; each item goes to the first call that requests one.
        items: The items.
        title: Name of the work in progress reports; None for no reports.

    Raises:
        Exception: The first error of `work`; the other calls then receive no more items.
    """
    left = deque(items)

    def take() -> Iterator[T]:
        with suppress(IndexError):
            while True:
                yield left.popleft()
                count(1)

    with ExitStack() as stack:
        count = stack.enter_context(report_progress(len(items), title)) if title else lambda done: None
        pool = stack.enter_context(ThreadPoolExecutor(NUM_THREADS))
        futures = [pool.submit(work, take()) for _ in range(min(NUM_THREADS, len(items)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            left.clear()
    for future in futures:
        future.result()
