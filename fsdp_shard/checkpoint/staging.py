"""A copy of this rank's part of the state in host memory, so that a step can be written while training goes on.

The memory is allocated once and used again by every save: fresh pages cost several times the copy. Parameters and
optimizer state do not change before the next `optimizer.step()`, so their copy may go on through the next forward and
backward pass, and only has to be `settled` before the weights change; buffers, which a forward pass may change, are
copied at once. Parts on a GPU are copied to pinned memory by a stream of their own. Knows no file and no wrapper.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.index import tensor_bytes
from fsdp_shard.checkpoint.state import RunState
from fsdp_shard.shards import LocalShard

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # a multiple of every element's size, and a cache line

Job = tuple["torch.Tensor", "torch.Tensor"]  # (host memory, source), flat and alike


class Copy:
    """A copy under way. `run` makes it, in whatever thread; `settle` is called before the weights change."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = [job for job in jobs if job[1].device.type == "cpu"]
        self._copied = threading.Event()
        self._transfer = _start_transfer([job for job in jobs if job[1].device.type != "cpu"])

    def run(self) -> None:
        """Copy what is in host memory, and wait for what comes from a GPU; returns when all of it is there."""
        try:
            for job in self._jobs:
                _copy(job)
        finally:
            self._copied.set()
        if self._transfer is not None:
            self._transfer.synchronize()

    def settle(self) -> None:
        """Let nothing that follows change the state before it is copied; on a GPU the stream waits, not this thread."""
        self._copied.wait()
        if self._transfer is not None:
            import torch

            torch.cuda.current_stream().wait_event(self._transfer)


class Staging:
    """The memory that one rank's copies are made in, one at a time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def stage(self, state: RunState) -> tuple[RunState, Copy]:
        """`state` as it will be in host memory once the returned copy has run; what it stages now is overwritten then.

        Parts that another rank writes are not copied: their `data` is empty.
        """
        from torch import nn

        parts = (state.weights, state.optimizer)
        shards = [shard for part in parts for shard in part.values()]
        is_pinned = any(shard.data.device.type == "cuda" for shard in shards)
        memory = self._get_memory(sum(map(_num_bytes, shards)), is_pinned)
        at = 0
        at_once: list[Job] = []
        later: list[Job] = []
        staged: list[dict[str, LocalShard]] = [{}, {}]
        for part, copies in zip(parts, staged, strict=True):
            for name, shard in part.items():
                count = len(shard.data) if shard.writes else 0
                host = memory[at : at + count * shard.data.element_size()].view(shard.data.dtype)
                copies[name] = replace(shard, tensor=host, data=host)
                at += _num_bytes(shard)
                is_buffer = part is state.weights and not isinstance(shard.tensor, nn.Parameter)
                if count:
                    (at_once if is_buffer else later).append((host, shard.data))
        for host, source in at_once:
            host.copy_(source)
        return replace(state, weights=staged[0], optimizer=staged[1]), Copy(later)

    def _get_memory(self, num_bytes: int, pinned: bool) -> torch.Tensor:
        import torch

        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = None  # before the new memory is taken
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _num_bytes(shard: LocalShard) -> int:
    size = len(shard.data) * shard.data.element_size() if shard.writes else 0
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _copy(job: Job) -> None:
    """By numpy, which lets other threads run meanwhile and starts none of its own, as torch would."""
    import numpy as np

    host, source = (np.frombuffer(tensor_bytes(tensor), dtype=np.uint8) for tensor in job)
    np.copyto(host, source)


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
