"""Runs many forward passes of a model with streamed blocks side by side: each block is read once for all of them.

Each pass has its own thread, which is suspended when it reaches a streamed block. Only one thread runs at a time: once
a block is fetched, every pass waiting for it continues to its next streamed block or to its end, one after the other.
This makes no assumptions about the model's code, and each pass runs the same operations with the same order and shapes
as alone: its results are bitwise equal. Values that a pass needs later, such as masks, stay in its stack frames.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from threading import Semaphore, Thread, current_thread
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fsdp_shard.errors import RunError
from fsdp_shard.inference.offload.block_hooks import ANOTHER_THREAD, BlockStream
from fsdp_shard.inference.offload.hidden_state_file import HiddenStateFile
from fsdp_shard.utils import give_back_free_memory

T = TypeVar("T")


def run_wave(
    stream: BlockStream,
    passes: Sequence[Callable[[], T]],
    *,
    embeddings: torch.nn.Module | None = None,
    file: HiddenStateFile | None = None,
    is_last: bool = True,
) -> Generator[T]:
    """Run passes of the model with the blocks in `stream`, block by block.

    Args:
        stream: The streamed blocks.
        passes: The passes. Each is called in its own thread, so it must itself enter torch modes that belong to
            threads, such as `inference_mode`.
        embeddings: The module that outputs the initial hidden states, if `file` should hold them too.
        file: The file for hidden states of waiting passes; None to leave them in memory.
        is_last: Whether nothing follows that needs prefetched blocks.

    Yields:
        The results in the order of `passes`, each as soon as it and the previous ones are complete.

    Raises:
        Exception: The first error of a pass or fetch. The other passes are cancelled.
    """
    wave = _Wave(stream, passes, file)
    hook = None if embeddings is None or file is None else embeddings.register_forward_hook(wave.note)
    try:
        with stream.driven(wave):
            try:
                yield from wave.results(is_last)
            finally:
                wave.cancel()
    finally:
        if hook is not None:
            hook.remove()


class _PassCancelled(BaseException):
    """Ends a pass whose result is not needed; not an Exception, because model code may catch those."""


class _Pass(Generic[T]):
    """A pass, and the block it waits for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.resume_signal = Semaphore(0)
        self.thread: Thread | None = None
        self.waits_for: int | None = None
        self.embeddings: list[ref[Tensor]] = []
        self.results: list[T] = []
        self.error: BaseException | None = None


class _Wave(Generic[T]):
    """The passes of a wave; implements `Driver`."""

    def __init__(self, stream: BlockStream, passes: Sequence[Callable[[], T]], file: HiddenStateFile | None) -> None:
        self._stream, self._file = stream, file
        self._passes = [_Pass(work) for work in passes]
        self._by_thread: dict[Thread, _Pass[T]] = {}
        self._suspended = Semaphore(0)
        self._entered: set[int] = set()
        self._inside: Counter[int] = Counter()
        self._first: int | None = None
        self._is_cancelled = False

    def results(self, is_last: bool) -> Iterator[T]:
        """Yield the results, in order."""
        left = iter(self._passes)
        due = next(left, None)
        for one in self._run_block_by_block(is_last):
            if one.error is not None:
                raise one.error
            while due is not None and due.results:
                yield due.results.pop()
                due = next(left, None)

    def before(self, number: int, inputs: Sequence[Any]) -> None:
        """Suspend the pass of this thread until block `number` is entered."""
        one = self._by_thread.get(current_thread())
        if one is None:
            raise RunError(ANOTHER_THREAD)
        if self._is_cancelled:
            raise _PassCancelled
        if self._file is not None:
            self._file.move([*inputs, *(tensor() for tensor in one.embeddings)])
        one.waits_for = number
        self._suspended.release()
        one.resume_signal.acquire()
        if self._is_cancelled:
            raise _PassCancelled
        self._inside[number] += 1

    def after(self, number: int) -> None:
        """Record that a pass left block `number`."""
        if current_thread() in self._by_thread and self._inside[number]:
            self._inside[number] -= 1

    def note(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Record the output of the embeddings, which many models keep until the end of a pass."""
        one = self._by_thread.get(current_thread())
        if one is not None and isinstance(output, Tensor):
            one.embeddings.append(ref(output))

    def cancel(self) -> None:
        """End all threads; a computing thread ends when it reaches its next block."""
        self._is_cancelled = True
        for one in self._by_thread.values():
            one.resume_signal.release()
        for thread in self._by_thread:
            thread.join()

    def _run_block_by_block(self, is_last: bool) -> Iterator[_Pass[T]]:
        """Yield each pass once it has run to its next block or its end."""
        for one in self._passes:
            yield self._run_on(one)
        while waiting := [one for one in self._passes if one.waits_for is not None]:
            # A pass that fell behind, because it uses blocks that others skip, catches up first.
            number = min(one.waits_for for one in waiting if one.waits_for is not None)
            self._enter_only(number, is_last)
            for one in waiting:
                if one.waits_for == number:
                    yield self._run_on(one)

    def _enter_only(self, number: int, is_last: bool) -> None:
        """Enter block `number`, and leave the others, except those in which a pass reached this one."""
        for other in [other for other in self._entered if other != number and not self._inside[other]]:
            self._stream.leave(other)
            self._entered.remove(other)
        if self._first is None:
            self._first = number
        if number not in self._entered:
            self._stream.enter(number, end=self._first if is_last else None)
            self._entered.add(number)

    def _run_on(self, one: _Pass[T]) -> _Pass[T]:
        one.waits_for = None
        if one.thread is None:
            one.thread = Thread(target=self._run, args=(one,), name="fsdp-shard-pass", daemon=True)
            self._by_thread[one.thread] = one
            try:
                one.thread.start()
            except RuntimeError as error:
                del self._by_thread[one.thread]
                raise RunError(
                    f"dispatch.schedule=layer_major needs a thread for each of {len(self._passes)} batches, and this "
                    f"process may not start so many; raise its limit (ulimit -u), increase batch_size, or set "
                    f"dispatch.schedule=batch_major."
                ) from error
        else:
            one.resume_signal.release()
        self._suspended.acquire()
        give_back_free_memory()  # glibc keeps freed memory per thread, which would add up over all passes
        return one

    def _run(self, one: _Pass[T]) -> None:
        device = self._stream.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                one.results.append(one.work())
        except BaseException as error:  # raised again where the results are consumed
            one.error = error
        self._suspended.release()
