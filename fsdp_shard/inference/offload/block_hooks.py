"""Blocks whose parameters are brought to the main device shortly before they run, and let go after it.

While a block computes, threads fetch those that will follow it. Parameters that the CPU can use where they lie in a
file stay in the module; only their pages are brought in and, where memory is short, dropped. The others are on the meta
device, and hooks around the block's forward pass put a buffer of the ring in their place. What follows what is learnt
from the passes before, so an encoder that runs once does not confuse the decoder. Knows no files and no model class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any

from torch import Tensor, nn

from fsdp_shard.errors import RunError
from fsdp_shard.inference.offload.buffer_ring import Buffer, Content, Ring


@dataclass(frozen=True)
class Slot:
    """A place for a parameter: in `owner`, under `name`. `number` is its tensor in the block's content."""

    owner: nn.Module
    name: str
    meta: nn.Parameter
    number: int


@dataclass(frozen=True)
class StreamedBlock:
    """`content` is what goes into a buffer, shown in `slots`; `bring_in` and `drop` are for what is used in place."""

    module: nn.Module
    slots: Sequence[Slot]
    content: Content
    bring_in: Callable[[], None]
    drop: Callable[[], None]

    @property
    def needs_buffer(self) -> bool:
        return bool(self.content.tensors)


class BlockStream:
    """The streamed blocks of a model, in the order in which they are added; at most `prefetch` of them run ahead."""

    def __init__(self, ring: Ring, prefetch: int) -> None:
        self._ring, self._prefetch = ring, prefetch
        self._blocks: list[StreamedBlock] = []
        self._fetches: dict[int, tuple[Future[None], Buffer | None]] = {}
        self._shown: dict[int, Buffer | None] = {}
        self._follows: dict[int, int] = {}
        self._last: int | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._thread: int | None = None  # whose pass it is

    def add(self, block: StreamedBlock) -> None:
        """Stream `block` whenever its forward pass runs."""
        number = len(self._blocks)
        self._blocks.append(block)
        self._ring.num_bytes = max(self._ring.num_bytes, block.content.num_bytes)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            _refuse_empty(module, [*args, *kwargs.values()])
            with self._lock:
                self._refuse_others()
                self._leave(number)  # in case that Ctrl-C ended the last pass, after which torch calls no hooks
                self._enter(number)

        def after(*_: Any) -> None:
            with self._lock:
                if self._thread == get_ident():
                    self._leave(number)

        block.module.register_forward_pre_hook(before, with_kwargs=True)
        block.module.register_forward_hook(after, always_call=True)  # a pass that raises gives its buffer back, too

    def _refuse_others(self) -> None:
        """The blocks of two passes at once would be more than there is room for, and get each other's memory."""
        if self._shown and self._thread != get_ident():
            raise RunError(
                "Another thread runs this model, whose blocks are streamed: one pass at a time. Wait for it, or load "
                "the model once for each thread."
            )
        self._thread = get_ident()

    def _enter(self, number: int) -> None:
        if self._last is not None:
            self._follows[self._last] = number
        self._last = number
        if number not in self._fetches:
            self._fetch(number)
        fetch, buffer = self._fetches[number]
        try:
            fetch.result()
        except Exception:
            self._forget(number)
            raise
        del self._fetches[number]
        self._shown[number] = buffer
        if buffer is not None:
            self._ring.ready(buffer)
            block = self._blocks[number]
            shown = [nn.Parameter(view, requires_grad=False) for view in block.content.views(buffer.memory)]
            for slot in block.slots:
                slot.owner._parameters[slot.name] = shown[slot.number]
        self._run_ahead(number)

    def _leave(self, number: int) -> None:
        if number not in self._shown:
            return
        block, buffer = self._blocks[number], self._shown.pop(number)
        for slot in block.slots:
            slot.owner._parameters[slot.name] = slot.meta
        if buffer is not None:
            self._ring.finished(buffer)
            self._ring.give(buffer)
        block.drop()
        self._run_ahead(number)

    def _run_ahead(self, number: int) -> None:
        """Fetch what comes after block `number`; what was fetched and does not come soon makes room for it."""
        coming: list[int] = []
        for _ in range(self._prefetch):
            number = self._follows.get(number, (number + 1) % len(self._blocks))
            if number not in coming and number not in self._shown:
                coming.append(number)
        for other in [other for other in self._fetches if other not in coming]:
            self._forget(other)
        for wanted in coming:
            if wanted not in self._fetches and len(self._fetches) + len(self._shown) <= self._prefetch:
                self._fetch(wanted)

    def _fetch(self, number: int) -> None:
        block = self._blocks[number]
        if self._fetches and len(self._fetches) + len(self._shown) > self._prefetch:
            self._forget(next(reversed(self._fetches)))  # it was a wrong guess
        buffer = self._ring.take() if block.needs_buffer else None
        if self._threads is None:
            # Two, so that whoever reads has the next block's parts to go on with when the last of one are on their way.
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="fsdp-shard-prefetch")
        self._fetches[number] = self._threads.submit(_load, block, self._ring, buffer), buffer

    def _forget(self, number: int) -> None:
        """Give up a fetch; its buffer is free once nobody writes into it."""
        fetch, buffer = self._fetches[number]
        if not fetch.cancel():
            with suppress(Exception):  # who asked for it has been told; a wrong guess concerns nobody
                fetch.result()
        del self._fetches[number]
        self._blocks[number].drop()
        if buffer is not None:
            self._ring.give(buffer)


def _refuse_empty(module: nn.Module, inputs: Sequence[Any]) -> None:
    if any(isinstance(value, Tensor) and value.is_meta for value in inputs):
        raise RunError(
            f"A {type(module).__name__} whose weights are streamed was handed an input without values: the model's "
            f"code asks where these weights are, and between passes they are nowhere. Keep this block in memory, by a "
            f"larger max_memory or a device_map that names it."
        )


def _load(block: StreamedBlock, ring: Ring, buffer: Buffer | None) -> None:
    block.bring_in()
    if buffer is not None:
        ring.load(block.content, buffer)
