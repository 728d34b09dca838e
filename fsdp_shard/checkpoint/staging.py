"""This rank's part of the state as it was at one moment, for a save that goes on behind the training.

Parameters and optimizer state do not change before the next `optimizer.step()`. So what lies in host memory is written
from where it lies, through the next forward and backward pass, and only what is not written by then is copied, when the
save is `settled` before the weights change. That memory is allocated once and used again by every save: fresh pages
cost several times the copy. Buffers, which a forward pass may change, are copied at once. Parts on a GPU are copied to
pinned memory by a stream of their own. Knows no file and no wrapper.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.files import copy_bytes
from fsdp_shard.checkpoint.index import tensor_bytes
from fsdp_shard.checkpoint.state import RunState
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # a multiple of every element's size, and a cache line

Job = tuple["torch.Tensor", "torch.Tensor"]  # (host memory, source), flat and alike


class Copy:
    """What a save reads. `settle` is called before the weights change, from another thread than those that read."""

    def __init__(self, jobs: list[Job]) -> None:
        self._parts = {id(source): _Part(host, source) for host, source in jobs if source.device.type == "cpu"}
        self._transfer = _start_transfer([job for job in jobs if job[1].device.type != "cpu"])
        self._is_over = False

    def wait(self) -> None:
        """Until what comes from a GPU is there."""
        if self._transfer is not None:
            self._transfer.synchronize()

    def reading(self, shard: LocalShard, part: slice) -> AbstractContextManager[memoryview]:
        """Some bytes of a staged shard, which a save reads once each; while it does, they cannot change."""
        staged = self._parts.get(id(shard.data))
        return nullcontext(tensor_bytes(shard.data)[part]) if staged is None else _Reading(staged, part)

    def settle(self) -> None:
        """Let nothing that follows change what is still to be read; on a GPU the stream waits, not this thread."""
        for part in self._parts.values():
            with part.lock:
                if part.num_unread and not (part.is_copied or self._is_over):
                    _copy(part)
        if self._transfer is not None:
            import torch

            torch.cuda.current_stream().wait_event(self._transfer)

    def end(self) -> None:
        """Nothing is read any more."""
        self._is_over = True


class _Part:
    """A shard in host memory, `source`, where it is copied to if it has to be, and how many bytes are to be read."""

    def __init__(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self.host, self.source = host, source
        self.lock = threading.Lock()
        self.num_unread = source.nbytes
        self.is_copied = False


class _Reading:
    """A block in which some bytes of a part are read. A class, as a generator takes longer than what is done in it."""

    def __init__(self, staged: _Part, part: slice) -> None:
        self._staged, self._part = staged, part

    def __enter__(self) -> memoryview:
        staged = self._staged
        assert staged.num_unread or staged.is_copied, "they may have changed since"
        staged.lock.acquire()
        return tensor_bytes(staged.host if staged.is_copied else staged.source)[self._part]

    def __exit__(self, *_: object) -> None:
        self._staged.num_unread -= self._part.stop - self._part.start
        self._staged.lock.release()


class Staging:
    """The memory that one rank's copies are made in, one at a time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def stage(self, state: RunState) -> tuple[RunState, Copy]:
        """`state` for a save behind the training, and the copy that it reads through; the save before must have ended.

        Parts that another rank writes are left out: their `data` is empty.
        """
        from torch import nn

        parts = (state.weights, state.optimizer)
        shards = [shard for part in parts for shard in part.values()]
        is_pinned = any(shard.data.device.type == "cuda" for shard in shards)
        memory = self._get_memory(sum(_aligned(shard.data.nbytes) for shard in shards if shard.writes), is_pinned)
        at = 0
        at_once: list[Job] = []
        later: list[Job] = []
        staged: list[dict[str, LocalShard]] = [{}, {}]
        for part, copies in zip(parts, staged, strict=True):
            for name, shard in part.items():
                data, size = shard.data, shard.data.nbytes if shard.writes else 0
                host = memory[at : at + size].view(data.dtype)
                at += _aligned(size)
                is_buffer = part is state.weights and not isinstance(shard.tensor, nn.Parameter)
                stays = size and not is_buffer and data.device.type == "cpu"
                copies[name] = LocalShard(
                    host, data if stays else host, shard.start, shard.shape, shard.writes, shard.box
                )
                if size:
                    (at_once if is_buffer else later).append((host, data))
        for host, source in at_once:
            host.copy_(source)
        copy = Copy(later)
        staged_state = replace(state, weights=staged[0], optimizer=staged[1], reading=copy.reading, is_behind=True)
        return staged_state, copy

    def _get_memory(self, num_bytes: int, pinned: bool) -> torch.Tensor:
        import torch

        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = None  # before the new memory is taken
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _copy(part: _Part) -> None:
    copy_bytes(tensor_bytes(part.host), tensor_bytes(part.source))
    part.is_copied = True


def _start_transfer(jobs: list[Job]) -> Any:
    """Have a side stream copy from the GPU, after all that is queued there; the event of its end, if there is a job."""
    import torch

    if not jobs:
        return None
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for host, source in jobs:
            host.copy_(source, non_blocking=True)
        event.record(stream)
    return event
