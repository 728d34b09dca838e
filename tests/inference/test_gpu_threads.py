"""Threads that copy to a GPU do so on the GPU of the model: a new thread of CUDA is on GPU 0, where it makes a context.

torch.cuda is stood in for, and memory is the CPU's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint import open_checkpoint
from fsdp_shard.inference.offload.buffer_ring import Content, GpuRing
from fsdp_shard.inference.offload.tensor_reader import TensorReader

_GPU = torch.device("cuda", 1)


class _OnGpu(torch.Tensor):
    """Memory of the CPU that says that it is on a GPU."""

    is_cuda = True
    device = _GPU


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is done, and the number of the GPU that its thread is on."""
    found: list[tuple[str, int]] = []
    here, empty, copy = threading.local(), torch.empty, torch.Tensor.copy_

    def note(what: str) -> None:
        found.append((what, getattr(here, "number", 0)))

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, here.number = getattr(here, "number", 0), device.index
        yield
        here.number = before

    def allocate(*sizes: Any, pin_memory: bool = False, device: Any = None, **given: Any) -> torch.Tensor:
        if pin_memory:
            note("page-locked")
        return empty(*sizes, **given)

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking or target.is_cuda:
            note("copied")
        return copy(target, source)

    def page_lock(address: int, num_bytes: int, flags: int) -> int:
        note("page-locked")
        return 0

    class Stream:
        def wait_event(self, event: Any) -> None:
            pass

    class Event:
        def record(self, stream: Stream) -> None:
            note("event")

    cudart = SimpleNamespace(cudaHostRegister=page_lock, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return found


def test_a_thread_that_streams_is_on_the_gpu_of_its_buffers(done: list[tuple[str, int]]) -> None:
    def fill(wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in wanted:
            tensor.fill_(3)

    ring = GpuRing(_GPU, fill)
    content = Content((("weight", torch.uint8, (4,)),))
    ring.fit(content)
    buffer = ring.acquire()
    del done[:]
    thread = threading.Thread(target=ring.load, args=(content, buffer))
    thread.start()
    thread.join()
    assert done == [("page-locked", 1), ("copied", 1), ("event", 1)]
    assert int(buffer.memory[0]) == 3


def test_threads_that_read_are_on_the_gpu_of_what_they_fill(done: list[tuple[str, int]], tiny_model: Path) -> None:
    with open_checkpoint(tiny_model) as index:
        wanted = [
            (name, torch.zeros(entry.shape, dtype=torch.bfloat16).as_subclass(_OnGpu))
            for name, entry in index.tensors.items()
        ]
        expected = {name: index.read(name).bfloat16() for name, _ in wanted}
        TensorReader(index).fill_all(wanted)
    assert {what for what, _ in done} == {"page-locked", "copied"}
    assert {number for _, number in done} == {1}
    assert all(torch.equal(out.as_subclass(torch.Tensor), expected[name]) for name, out in wanted)
