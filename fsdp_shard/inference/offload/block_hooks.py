"""Streams blocks: their parameters are fetched to the main device shortly before they run, and released afterwards.

While a block computes, threads fetch those that follow it. Parameters that the CPU can use directly in a file stay in
the module; only their pages are populated and, where memory is short, dropped. The others are on the meta device, and
hooks around the block's forward pass replace them by views of a buffer. The order of blocks is learned from earlier
passes, so an encoder that runs once does not confuse the decoder.

Instead of the passes themselves, a schedule may say when blocks are fetched and released (`layer_major`).
"""

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
_KEEP = "keep this block in memory, by a larger max_memory or a device_map that names it"


class Driver(Protocol):
    """What decides when blocks are fetched and released, while it drives a stream."""

    def before(self, number: int, inputs: Sequence[Any]) -> None:
        """A pass, in the calling thread, comes to block `number`, whose weights must be there on return."""
        ...

    def after(self, number: int) -> None:
        """The pass has left the block, or failed in it."""
        ...


@dataclass(frozen=True)
class Slot:
    """A parameter of a block: attribute `name` of `owner`, on meta between passes; tensor `number` of its content."""

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
        populate: Reads the pages of parameters that are used directly in a file.
        drop: Releases those pages.
        num_bytes: What a fetch reads.
        params: All its parameters as they are now, with those of a layer that was put around it; each has values
            while it runs.
    """

    module: nn.Module
    slots: Sequence[Slot]
    content: Content
    populate: Callable[[], None]
    drop: Callable[[], None]
    num_bytes: int = 0
    params: Callable[[], Iterable[Tensor]] = tuple


class BlockStream:
    """The streamed blocks of a model, in the order in which they are added; at most `prefetch` are fetched ahead.

    Attributes:
        device: The device that they compute on.
        num_fetches: Fetches of blocks so far.
        num_bytes_fetched: The bytes of their weights.
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
        # Two, so that reads of the next block are queued when the last ones of a block are in progress.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fsdp-shard-prefetch")
        self._lock = Lock()
        self._thread: int | None = None  # whose pass it is
        self._driver: Driver | None = None
        self._end: int | None = None  # the block with which a next round would begin, if there is none

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def reads_files(self) -> bool:
        """Whether weights are read into buffers, rather than used in mapped files, or copied from CPU memory."""
        return any(block.content.tensors and block.content.resident is None for block in self._blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return sum(block.num_bytes for block in self._blocks)

    def add(self, block: StreamedBlock) -> None:
        """Stream `block` whenever its forward pass runs."""
        number = len(self._blocks)
        self._blocks.append(block)
        self._ring.fit(block.content)

        block.module.register_forward_pre_hook(partial(self._before, number), with_kwargs=True)
        # A pass that raises releases its buffer, too.
        block.module.register_forward_hook(partial(self._after, number), always_call=True)
        for owner, name in {slot.owner: slot.name for slot in block.slots if slot.owner is not block.module}.items():
            owner.register_forward_pre_hook(partial(_refuse_alone, type(block.module).__name__, name))

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _has_meta((args, kwargs)):
            raise RunError(
                f"A {type(module).__name__} whose weights are streamed got an input without values: the model's "
                f"code asks for the device of these weights, which are on meta between passes. K{_KEEP[1:]}."
            )
        if self._driver is not None:
            self._driver.before(number, (*args, *kwargs.values()))
        else:
            with self._lock:
                self._check_thread()
                self._leave(number)  # in case that Ctrl-C ended the last pass, after which torch calls no hooks
                self._enter(number)
        if any(param.is_meta for param in self._blocks[number].params()):  # torch would compute with any values
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
        """Refuse to be copied or pickled: files, threads and buffers belong to one model in one process."""
        raise RunError(CANNOT_COPY)

    @contextmanager
    def driven(self, driver: Driver) -> Iterator[None]:
        """Meanwhile, `driver` is called as passes come to blocks and leave them; it calls `enter` and `leave`."""
        with self._lock:
            if self._driver is not None:
                raise RunError(ANOTHER_THREAD)
            self._check_thread()
            for number in list(self._running):  # of a pass that Ctrl-C ended
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
        """Wait until block `number` is fetched, and fetch what follows it, but not from block `end` on."""
        with self._lock:
            self._end = end
            self._enter(number)

    def leave(self, number: int) -> None:
        """Release the weights of block `number`, if it has been entered."""
        with self._lock:
            self._leave(number)

    def _check_thread(self) -> None:
        """Two passes at once would need more memory than is reserved, and overwrite each other's buffers."""
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
            self._ring.ready(buffer)
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
            self._ring.finished(buffer)
            self._ring.release(buffer)
        block.drop()
        self._fetch_ahead(number)

    def _fetch_ahead(self, number: int) -> None:
        """Fetch what follows block `number`; what was fetched and does not follow soon is given up."""
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
        """Give up a fetch; its buffer is free when nothing is written to it any more."""
        fetch, buffer = self._fetches[number]
        if not fetch.cancel():
            with suppress(Exception):  # raised already where the block was needed; of no concern if it was not
                fetch.result()
        del self._fetches[number]
        self._blocks[number].drop()
        if buffer is not None:
            self._ring.release(buffer)


def _has_meta(value: Any) -> bool:
    """Whether a tensor without values is among the inputs of a module, in tuples, lists and mappings, too."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(_has_meta, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_meta, value))


def _refuse_alone(block: str, name: str, module: nn.Module, _: Any) -> None:
    """Raise RunError for a module in a streamed block that is called while the block does not run."""
    if getattr(module, name).is_meta:  # torch would compute with any values
        raise RunError(
            f"A {type(module).__name__} is called while the {block} that it belongs to does not run, and its weights "
            f"are read only for that: call the whole {block}, or {_KEEP}."
        )


def _load(block: StreamedBlock, ring: Ring, buffer: Buffer | None) -> None:
    block.populate()
    if buffer is not None:
        ring.load(block.content, buffer)
