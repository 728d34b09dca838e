"""Streams blocks: fetches their parameters to the execution device shortly before they run, and releases them after.

While a block computes, threads fetch the following ones. Parameters that the CPU can use directly in a file stay in
the module; only their pages are populated and, if memory is short, dropped. The others are on the meta device, and
hooks around the block's forward pass replace them with views of a buffer. The block order is learned from earlier
passes, so an encoder that runs once does not confuse the decoder.

Instead of the passes, a schedule may control when blocks are fetched and released (`layer_major`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from fsdp_shard.errors import RunError
from fsdp_shard.inference.offload.buffer_ring import Buffer, Content, Ring

ANOTHER_THREAD = (
    "Another thread runs this model, whose blocks are streamed: one pass at a time. Wait for it, or load the model "
    "once per thread."
)
CANNOT_COPY = (
    "A model with blocks that are streamed cannot be copied or pickled; load it again by load_dispatched, in the "
    "process that needs it, or keep all of it in memory (device_map=cpu)."
)
FORKED = (
    "A model with blocks that are streamed cannot run in a process that was forked after it was loaded, which lacks "
    "the threads that read them; load it by load_dispatched in the process that needs it, or keep all of it in memory "
    "(device_map=cpu)."
)
_KEEP = "keep this block in memory, by a larger max_memory or a device_map that names it"


class Driver(Protocol):
    """Decides when blocks are fetched and released while it drives a stream."""

    def before(self, number: int, inputs: Sequence[Any]) -> None:
        """Handle a pass, in the calling thread, that reaches block `number`; its weights must be present on return."""
        ...

    def after(self, number: int) -> None:
        """Handle a pass that left the block, or failed in it."""
        ...


@dataclass(frozen=True)
class Slot:
    """A block parameter: attribute `name` of `owner`, on meta between passes; tensor `number` of the content."""

    owner: nn.Module
    name: str
    meta: nn.Parameter
    number: int


@dataclass(frozen=True)
class StreamedBlock:
    """A block to stream.

    Attributes:
        module: The block.
        slots: Its parameters that are views of a buffer while it runs.
        content: The tensors to read into the buffer.
        populate: Reads the pages of parameters used directly in a file.
        drop: Releases those pages.
        num_bytes: Bytes that a fetch reads.
        params: All current parameters, including those of a wrapping layer; each has values while the block runs.
    """

    module: nn.Module
    slots: Sequence[Slot]
    content: Content
    populate: Callable[[], None]
    drop: Callable[[], None]
    num_bytes: int = 0
    params: Callable[[], Iterable[Tensor]] = tuple


class BlockStream:
    """The streamed blocks of a model, in insertion order; at most `prefetch` are fetched ahead.

    Attributes:
        device: The device that computes them.
        num_fetches: Number of block fetches so far.
        num_bytes_fetched: Bytes of weights fetched so far.
    """

    def __init__(self, ring: Ring, prefetch: int) -> None:
        self.device = ring.device
        self.num_fetches = self.num_bytes_fetched = 0
        self._ring, self._prefetch = ring, prefetch
        self._blocks: list[StreamedBlock] = []
        self._fetches: dict[int, tuple[Future[None], Buffer | None]] = {}
        self._running: dict[int, Buffer | None] = {}
        self._successors: dict[int, int] = {}
        self._last: int | None = None
        # Two, so that the next block's reads are queued while a block's last reads are in progress.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fsdp-shard-prefetch")
        self._lock = Lock()
        self._process = os.getpid()
        self._thread: int | None = None  # the thread of the current pass
        self._driver: Driver | None = None
        self._end: int | None = None  # the first block of the next round, if there is no next round

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def reads_files(self) -> bool:
        """Whether weights are read into buffers, not used in mapped files or copied from CPU memory."""
        return any(block.content.tensors and block.content.resident is None for block in self._blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights read per pass."""
        return sum(block.num_bytes for block in self._blocks)

    def add(self, block: StreamedBlock) -> None:
        """Stream `block` whenever its forward pass runs."""
        number = len(self._blocks)
        self._blocks.append(block)
        self._ring.fit(block.content)

        block.module.register_forward_pre_hook(partial(self._before, number), with_kwargs=True)
        # A pass that raises also releases its buffer.
        block.module.register_forward_hook(partial(self._after, number), always_call=True)
        for owner, name in {slot.owner: slot.name for slot in block.slots if slot.owner is not block.module}.items():
            owner.register_forward_pre_hook(partial(_refuse_alone, type(block.module).__name__, name))

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _has_meta((args, kwargs)):
            raise RunError(
                f"A {type(module).__name__} whose weights are streamed got an input without values: the model's "
                f"code asks for the device of these weights, which are on meta between passes. To avoid that, {_KEEP}."
            )
        self._check_process()
        if self._driver is not None:
            self._driver.before(number, (*args, *kwargs.values()))
        else:
            with self._lock:
                self._check_thread()
                self._leave(number)  # in case Ctrl-C ended the last pass, after which torch calls no hooks
                self._enter(number)
        if any(param.is_meta for param in self._blocks[number].params()):  # torch would compute with arbitrary values
            raise RunError(
                f"A {type(module).__name__} whose weights are streamed has parameters without values: an adapter that "
                f"is added to it is on meta, as its weights are between passes. Load the model by "
                f"load_dispatched(adapters={{NAME: PATH}}), or {_KEEP}."
            )

    def _after(self, number: int, *_: Any) -> None:
        if self._driver is not None:
            self._driver.after(number)
            return
        with self._lock:
            if self._thread == get_ident():
                self._leave(number)

    def __reduce__(self) -> NoReturn:
        """Prevent copying and pickling: files, threads and buffers belong to one model in one process."""
        raise RunError(CANNOT_COPY)

    @contextmanager
    def driven(self, driver: Driver) -> Iterator[None]:
        """Within the context, call `driver` as passes reach blocks and leave them; it calls `enter` and `leave`."""
        self._check_process()
        with self._lock:
            if self._driver is not None:
                raise RunError(ANOTHER_THREAD)
            self._check_thread()
            for number in list(self._running):  # left over from a pass that Ctrl-C ended
                self._leave(number)
            self._driver = driver
        try:
            yield
        finally:
            with self._lock:
                for number in list(self._running):
                    self._leave(number)
                self._driver = self._end = None

    def enter(self, number: int, *, end: int | None = None) -> None:
        """Wait until block `number` is fetched, and fetch the following ones up to block `end`, exclusive."""
        with self._lock:
            self._end = end
            self._enter(number)

    def leave(self, number: int) -> None:
        """Release the weights of block `number`, if entered."""
        with self._lock:
            self._leave(number)

    def _check_process(self) -> None:
        """Reject passes in a forked process, which would wait forever for threads that it does not have."""
        if os.getpid() != self._process:
            raise RunError(FORKED)

    def _check_thread(self) -> None:
        """Reject concurrent passes, which would exceed the reserved memory and overwrite each other's buffers."""
        if self._running and self._thread != get_ident():
            raise RunError(ANOTHER_THREAD)
        self._thread = get_ident()

    def _enter(self, number: int) -> None:
        if self._last is not None:
            self._successors[self._last] = number
        self._last = number
        if number not in self._fetches:
            self._fetch(number)
        fetch, buffer = self._fetches[number]
        try:
            fetch.result()
        except Exception:
            self._cancel(number)
            raise
        del self._fetches[number]
        self._running[number] = buffer
        if buffer is not None:
            self._ring.wait(buffer)
            block = self._blocks[number]
            params = [nn.Parameter(view, requires_grad=False) for _, view in block.content.views(buffer.memory)]
            for slot in block.slots:
                setattr(slot.owner, slot.name, params[slot.number])
        self._fetch_ahead(number)

    def _leave(self, number: int) -> None:
        if number not in self._running:
            return
        block, buffer = self._blocks[number], self._running.pop(number)
        for slot in block.slots:
            setattr(slot.owner, slot.name, slot.meta)
        if buffer is not None:
            self._ring.record_use(buffer)
            self._ring.release(buffer)
        block.drop()
        self._fetch_ahead(number)

    def _fetch_ahead(self, number: int) -> None:
        """Fetch the blocks after block `number`; cancel fetched blocks that do not follow soon."""
        following: list[int] = []
        for _ in range(self._prefetch):
            number = self._successors.get(number, (number + 1) % len(self._blocks))
            if number == self._end:
                break
            if number not in following and number not in self._running:
                following.append(number)
        for other in self._fetches.keys() - following:
            self._cancel(other)
        for wanted in following:
            if wanted not in self._fetches and len(self._fetches) + len(self._running) <= self._prefetch:
                self._fetch(wanted)

    def _fetch(self, number: int) -> None:
        block = self._blocks[number]
        if self._fetches and len(self._fetches) + len(self._running) > self._prefetch:
            self._cancel(next(reversed(self._fetches)))  # it was a wrong guess
        self.num_fetches += 1
        self.num_bytes_fetched += block.num_bytes
        buffer = self._ring.acquire() if block.content.tensors else None
        self._fetches[number] = self._threads.submit(_load, block, self._ring, buffer), buffer

    def _cancel(self, number: int) -> None:
        """Cancel a fetch; its buffer is free once nothing writes to it any more."""
        fetch, buffer = self._fetches[number]
        if not fetch.cancel():
            with suppress(Exception):  # already raised where the block was needed; irrelevant otherwise
                fetch.result()
        del self._fetches[number]
        self._blocks[number].drop()
        if buffer is not None:
            self._ring.release(buffer)


def _has_meta(value: Any) -> bool:
    """Whether a module's inputs include a tensor without values, also in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(_has_meta, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_meta, value))


def _refuse_alone(block: str, name: str, module: nn.Module, _: Any) -> None:
    """Raise RunError for a call of a module in a streamed block that is not running."""
    if getattr(module, name).is_meta:  # torch would compute with arbitrary values
        raise RunError(
            f"A {type(module).__name__} is called while the {block} that it belongs to does not run, and its weights "
            f"are read only for that: call the whole {block}, or {_KEEP}."
        )


def _load(block: StreamedBlock, ring: Ring, buffer: Buffer | None) -> None:
    block.populate()
    if buffer is not None:
        ring.load(block.content, buffer)
