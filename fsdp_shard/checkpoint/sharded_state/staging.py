"""A snapshot of this rank's state, for a save that runs while training continues.

Parameters and optimizer state do not change before the next `optimizer.step()`. State in host memory is therefore
written directly during the next forward and backward pass. Tensors that have not been written by then are copied by
`copy_remaining`, before the weights change. The memory of the copies is allocated once and reused by every save: new
pages cost several times as much as the copy. Buffers, which a forward pass may change, are copied immediately. Tensors
on a GPU are copied to pinned memory on a separate stream.

Other changes, such as swapping in averages or clearing an optimizer's state, are not known in advance. In host memory,
torch's count of in-place changes reveals them, and the save fails. The count is that of the optimizer's own parameter
or state, which no wrapper's gather changes; a shard's memory may have another count. Changes through `.data` and by
torch's foreach operators on DTensors are not counted. On a GPU, the transfer may already be complete when a change is
seen, so changes cannot be detected.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.checkpoint.sharded_state.save_step import StepContent
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import SaveError
from fsdp_shard.utils import empty_pages, lock_pages, version

_ALIGNMENT = 64  # a multiple of every element size, and a cache line

Job = tuple[torch.Tensor, torch.Tensor]  # (host memory, source), flat, with equal dtype and size


class StagedCopy:
    """The source of a save. `copy_remaining` is called before the weights change, not in the thread of a reader."""

    def __init__(self, jobs: list[Job], shards: Mapping[str, LocalShard]) -> None:
        tensors = {id(shard.data): (name, shard.tensor) for name, shard in shards.items()}
        self._parts = {
            id(source): _Part(host, source, *tensors.get(id(source), ("", None)))
            for host, source in jobs
            if source.device.type == "cpu"
        }
        self._transfers = _start_transfers([job for job in jobs if job[1].device.type != "cpu"])
        self._is_over = False

    def wait(self) -> None:
        """Wait for the transfers from GPUs."""
        for device, end in self._transfers.items():
            with torch.cuda.device(device):  # for this thread, which would otherwise create a context on GPU 0
                end.synchronize()

    @contextmanager
    def reading(self, shard: LocalShard, part: slice) -> Iterator[memoryview]:
        """Yield a byte range of a staged shard that no step changes within the block; a save reads each byte once.

        Leaving the block raises SaveError if the bytes were changed in another way.
        """
        staged = self._parts.get(id(shard.data))
        if staged is None:
            yield tensor_bytes(shard.data)[part]
            return
        assert staged.num_unread or staged.is_copied, "they may have changed since"
        with staged.lock:
            yield tensor_bytes(staged.host if staged.is_copied else staged.source)[part]
            staged.num_unread -= part.stop - part.start
            staged.require_unchanged()

    def copy_remaining(self) -> None:
        """Copy everything not read yet, so that it may change; on a GPU, the stream waits for that, not this thread."""
        for part in self._parts.values():
            with part.lock:
                if part.num_unread and not (part.is_copied or self._is_over):
                    part.copy()
        for device, end in self._transfers.items():
            torch.cuda.current_stream(device).wait_event(end)

    def end(self) -> None:
        """Mark the save as ended, so no more copies are needed."""
        self._is_over = True


class _Part:
    """A shard in host memory: `source`, the memory `host` to copy it to, and the number of bytes not read yet.

    `tensor` is its parameter or optimizer state, called `name`, or None.
    """

    def __init__(self, host: torch.Tensor, source: torch.Tensor, name: str, tensor: torch.Tensor | None) -> None:
        self.host, self.source = host, source
        self.lock = threading.Lock()
        self.num_unread = source.nbytes
        self.is_copied = self._is_spoiled = False
        self._name, self._tensor = name, None if tensor is None or tensor.is_inference() else tensor
        self._version = self._count()

    def copy(self) -> None:
        """Copy the shard to `host`; afterwards, it may change."""
        self._is_spoiled = self._count() != self._version
        self.host.copy_(self.source)
        self.is_copied = True

    def require_unchanged(self) -> None:
        """Raise SaveError if the tensor was changed in place before it was copied, or if it is not copied."""
        if self._is_spoiled or (not self.is_copied and self._count() != self._version):
            raise SaveError(
                f"{self._name} was changed in place while it was being saved, and not by optimizer.step(). Call wait() "
                f"before weights are loaded or swapped, optimizer states changed, or a compiled step is taken, or save "
                f"with asynchronous=False."
            )

    def _count(self) -> int:
        return 0 if self._tensor is None else version(self._tensor)


class Staging:
    """The host memory that the saves of one rank use, one save at a time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def stage(self, content: StepContent) -> tuple[StepContent, StagedCopy]:
        """Prepare a background save; the previous one must have ended.

        Args:
            content: This rank's part of the step.

        Returns:
            The content for the save, in which shards that another rank writes have no `data`, and the copy through
            which it is read.
        """
        shards = [*content.weights.values(), *content.optimizer.values(), *content.average.values()]
        gpu = next((shard.data.device for shard in shards if shard.data.is_cuda), None)
        memory = self._get_memory(sum(_round_up(shard.data.nbytes) for shard in shards if shard.writes), gpu)
        used = 0
        jobs: list[Job] = []

        def staged(shard: LocalShard, *, is_buffer: bool) -> LocalShard:
            nonlocal used
            num_bytes = shard.data.nbytes if shard.writes else 0
            host = memory[used : used + num_bytes].view(shard.data.dtype)
            used += _round_up(num_bytes)
            if not num_bytes:
                return replace(shard, data=host)
            if is_buffer:
                host.copy_(shard.data)
                return replace(shard, data=host)
            jobs.append((host, shard.data))
            return shard if shard.data.device.type == "cpu" else replace(shard, data=host)

        weights, average = (
            {name: staged(shard, is_buffer=not isinstance(shard.tensor, nn.Parameter)) for name, shard in part.items()}
            for part in (content.weights, content.average)
        )
        optimizer = {name: staged(shard, is_buffer=False) for name, shard in content.optimizer.items()}
        copy = StagedCopy(jobs, {**content.weights, **content.optimizer})
        return replace(content, weights=weights, optimizer=optimizer, average=average, reading=copy.reading), copy

    def _get_memory(self, num_bytes: int, gpu: torch.device | None) -> torch.Tensor:
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = None  # frees it before the new memory is allocated
            self._memory = empty_pages(num_bytes)
            if gpu is not None:
                lock_pages(self._memory, gpu)
        return self._memory


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _start_transfers(jobs: list[Job]) -> dict[torch.device, torch.cuda.Event]:
    """Copy from each GPU on a separate side stream, after all work queued there; return the events at the ends."""
    ends = {}
    for device in {source.device: None for _, source in jobs}:
        with torch.cuda.device(device):  # it may not be the current device
            stream, ends[device] = torch.cuda.Stream(), torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for host, source in jobs:
                    if source.device == device:
                        host.copy_(source, non_blocking=True)
                ends[device].record(stream)
    return ends
