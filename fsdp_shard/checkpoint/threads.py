"""Work shared out over a few threads; what blocks in the system lets go of the interpreter's lock. Knows no files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 2
T = TypeVar("T")

_END = object()


def in_threads(work: Callable[[Iterator[T]], object], items: Sequence[T]) -> None:
    """Let NUM_THREADS calls of `work` share out `items`; the first exception stops all of them and is raised."""
    lock, left, stopped = threading.Lock(), iter(items), threading.Event()

    def share() -> Iterator[T]:
        while not stopped.is_set():
            with lock:
                item = next(left, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # not _END, so a T

    def guarded() -> None:
        try:
            work(share())
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(guarded) for _ in range(min(NUM_THREADS, len(items)))]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()
