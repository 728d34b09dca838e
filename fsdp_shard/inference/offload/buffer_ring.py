"""The few buffers on one device that the parameters of streamed blocks take turns in.

A buffer is laid out as one run of bytes, so that what lies together in CPU memory goes to a GPU in one copy. Each is
used by one block at a time: `take`, `load` (in any thread), `ready` and `finished` around the block's pass, `give`.
Knows no modules and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_ALIGN_BYTES = 256  # what a GPU's own allocator gives, and enough for any vector instruction

FillAll = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
"""Reads stored tensors by name into CPU memory."""


@dataclass(frozen=True)
class Content:
    """What a block needs in a buffer: for each tensor its stored name, dtype and shape.

    `kept` is CPU memory in the buffer's layout that holds them already; without it they are read from the checkpoint.
    """

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    kept: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(_pad(num_bytes) for num_bytes in self._sizes())

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, in `memory` (bytes)."""
        found, start = [], 0
        for (_, dtype, shape), num_bytes in zip(self.tensors, self._sizes(), strict=True):
            found.append(memory[start : start + num_bytes].view(dtype).view(shape))
            start += _pad(num_bytes)
        return found

    def _sizes(self) -> Iterator[int]:
        for _, dtype, shape in self.tensors:
            yield torch.Size(shape).numel() * dtype.itemsize


@dataclass
class Buffer:
    """`memory` on the device; `host`, `copied` and `used` are for GPUs: staging, and events that order the copies."""

    memory: torch.Tensor
    host: torch.Tensor | None = None
    copied: Any = None
    used: Any = None


@dataclass
class Ring:
    """Buffers in CPU memory."""

    device: torch.device
    fill_all: FillAll
    num_bytes: int = 0
    """Of each buffer: the most that a block needs. To be final before the first `take`."""
    _free: list[Buffer] = field(default_factory=list)

    def take(self) -> Buffer:
        """A free buffer; a new one where there is none, so the caller sees to it that they stay few."""
        if self._free:
            return self._free.pop()
        with torch.inference_mode(False):  # else it could be filled in no other mode than that of the first pass
            return self._new()

    def give(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def load(self, content: Content, buffer: Buffer) -> None:
        """Begin to put `content` into `buffer`; it is there once `ready` has returned, or for a GPU been passed."""
        self._read(content, buffer.memory)

    def ready(self, buffer: Buffer) -> None:
        """Let what the device does next find the content."""

    def finished(self, buffer: Buffer) -> None:
        """The device has been told all that it will do with the content."""

    def _new(self) -> Buffer:
        return Buffer(torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device))

    def _read(self, content: Content, memory: torch.Tensor) -> None:
        if content.kept is not None:
            memory[: content.num_bytes].copy_(content.kept)
            return
        names = (name for name, _, _ in content.tensors)
        self.fill_all(list(zip(names, content.views(memory), strict=True)))
        # Bytes were written behind torch's back: a backward pass that needs what was there before must not go on.
        torch.autograd.graph.increment_version(memory)


class GpuRing(Ring):
    """Buffers on a GPU: copies go from page-locked memory on a stream of their own, beside the computation."""

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)

    def _new(self) -> Buffer:
        buffer = super()._new()
        self.finished(buffer)  # the allocator may have given memory that kernels in the queue have yet to read
        return buffer

    def load(self, content: Content, buffer: Buffer) -> None:
        source = content.kept
        if source is None:
            if buffer.host is None:
                buffer.host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
            elif buffer.copied is not None:
                buffer.copied.synchronize()  # the copy before must have read the staging memory
            self._read(content, buffer.host)
            source = buffer.host[: content.num_bytes]
        with torch.cuda.stream(self._stream):
            if buffer.used is not None:
                self._stream.wait_event(buffer.used)
            buffer.memory[: content.num_bytes].copy_(source, non_blocking=True)
            buffer.copied = torch.cuda.Event()
            buffer.copied.record(self._stream)

    def ready(self, buffer: Buffer) -> None:
        torch.cuda.current_stream(self.device).wait_event(buffer.copied)

    def finished(self, buffer: Buffer) -> None:
        buffer.used = torch.cuda.Event()
        buffer.used.record(torch.cuda.current_stream(self.device))


def make_ring(device: torch.device, fill_all: FillAll) -> Ring:
    """The kind of ring that `device` takes."""
    return (GpuRing if device.type == "cuda" else Ring)(device, fill_all)


def page_lock(memory: torch.Tensor) -> None:
    """Let a GPU copy from `memory` by itself. Where the driver refuses, copies are slower and nothing else changes."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
