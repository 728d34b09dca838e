"""A save that runs in a thread of its own while training continues (hashing and writing release the interpreter)."""

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from fsdp_shard.checkpoint import StagedCopy, fault_point

T = TypeVar("T")


class BackgroundSave(Generic[T]):
    """Calls `work`, which reads the state of step `step` through `copy`, in a daemon thread."""

    def __init__(self, step: int, copy: StagedCopy, work: Callable[[], T]) -> None:
        self.step, self.copy = step, copy
        self._outcome: Future[T] = Future()
        threading.Thread(target=self._run, args=(work,), name=f"save-step-{step}", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._outcome.done()

    @property
    def is_saved(self) -> bool:
        """Whether the save has ended without an error."""
        return self.is_done and self._outcome.exception() is None

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until the save has ended, at most `timeout_seconds`."""
        concurrent.futures.wait([self._outcome], timeout_seconds)

    def result(self) -> T:
        """Wait for the save, and return what `work` returned or raise its error."""
        return self._outcome.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            try:
                self.copy.wait()
                fault_point("staged")
                saved = work()
            finally:
                self.copy.end()
        except BaseException as error:  # raised in the main thread by `result`, whatever it is
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(saved)
