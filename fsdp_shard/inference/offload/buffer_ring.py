"""A few buffers on one device that hold the parameters of streamed blocks, one block at a time each.

A buffer is one contiguous range, so contiguous CPU memory is copied to a GPU at once. Its life cycle is `acquire`,
`load` (in any thread), `wait` and `record_use` around the block's pass, `release`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_shard.utils import empty_pages, lock_pages

_ALIGN_BYTES = 256  # the alignment of torch's GPU allocator, sufficient for all vector instructions

FillAll = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
"""Reads stored tensors by name into CPU memory."""


@dataclass(frozen=True)
class Content:
    """The tensors that a block needs in a buffer.

    Attributes:
        tensors: Stored name, dtype and shape of each.
        resident: CPU memory that already holds them in the buffer's layout; otherwise they are read from the
            checkpoint.
    """

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    resident: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a buffer for these tensors."""
        return sum(_round_up(torch.Size(shape).numel() * dtype.itemsize) for _, dtype, shape in self.tensors)

    def views(self, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return stored names and tensors, as views of `memory` (bytes)."""
        found, start = [], 0
        for name, dtype, shape in self.tensors:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            found.append((name, memory[start : start + num_bytes].view(dtype).view(shape)))
            start += _round_up(num_bytes)
        return found


@dataclass
class Buffer:
    """Device memory; on a GPU also a staging buffer on the host, and events that order the copies."""

    memory: torch.Tensor
    host: torch.Tensor | None = None
    copied: Any = None
    used: Any = None


@dataclass
class Ring:
    """Buffers in CPU memory, of `num_bytes` each, which is fixed once the first is acquired."""

    device: torch.device
    fill_all: FillAll
    num_bytes: int = 0
    _free: list[Buffer] = field(default_factory=list)

    def fit(self, content: Content) -> None:
        """Enlarge buffers to hold `content`."""
        self.num_bytes = max(self.num_bytes, content.num_bytes)

    def acquire(self) -> Buffer:
        """Return a free buffer, or a new one; the caller limits their number.

        A backward pass that needs the previous content fails from here on, not only once the next content is present.
        """
        if self._free:
            buffer = self._free.pop()
            torch.autograd.graph.increment_version(buffer.memory)  # torch does not see file reads
            return buffer
        with torch.inference_mode(False):  # otherwise it could be filled only in the mode of the first pass
            return self._new()

    def release(self, buffer: Buffer) -> None:
        """Make `buffer` free."""
        self._free.append(buffer)

    def load(self, content: Content, buffer: Buffer) -> None:
        """Start loading `content`. It is loaded when `wait` returns, or on a GPU before any work queued after that."""
        self._read(content, buffer.memory)

    def wait(self, buffer: Buffer) -> None:
        """Make the device's next work wait for the content."""

    def record_use(self, buffer: Buffer) -> None:
        """Mark that all uses of the content are queued on the device."""

    def _new(self) -> Buffer:
        return Buffer(torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device))

    def _read(self, content: Content, memory: torch.Tensor) -> None:
        if content.resident is not None:
            memory[: content.num_bytes].copy_(content.resident)
        else:
            self.fill_all(content.views(memory))


@dataclass
class GpuRing(Ring):
    """Buffers on a GPU, filled from pinned memory on a separate stream, concurrently with computation."""

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        self._staging_bytes = 0

    def fit(self, content: Content) -> None:
        super().fit(content)
        if content.resident is None:
            self._staging_bytes = max(self._staging_bytes, content.num_bytes)

    def _new(self) -> Buffer:
        buffer = super()._new()
        buffer.memory.record_stream(self._stream)  # it may be freed during a copy to it
        self.record_use(buffer)  # the allocator may have returned memory that queued kernels still read
        return buffer

    def load(self, content: Content, buffer: Buffer) -> None:
        with torch.cuda.device(self.device):  # otherwise this thread would create a context on GPU 0
            source = self._staged(content, buffer) if content.resident is None else content.resident
            with torch.cuda.stream(self._stream):
                if buffer.used is not None:
                    self._stream.wait_event(buffer.used)
                buffer.memory[: content.num_bytes].copy_(source, non_blocking=True)
                buffer.copied = torch.cuda.Event()
                buffer.copied.record(self._stream)

    def _staged(self, content: Content, buffer: Buffer) -> torch.Tensor:
        if buffer.host is None:
            buffer.host = empty_pages(self._staging_bytes)
            lock_pages(buffer.host, self.device)
        elif buffer.copied is not None:
            buffer.copied.synchronize()  # the previous copy must have read the staging memory
        self._read(content, buffer.host)
        return buffer.host[: content.num_bytes]

    def wait(self, buffer: Buffer) -> None:
        torch.cuda.current_stream(self.device).wait_event(buffer.copied)

    def record_use(self, buffer: Buffer) -> None:
        buffer.used = torch.cuda.Event()
        buffer.used.record(torch.cuda.current_stream(self.device))


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
