"""The order of copies to a GPU and of what reads them; torch.cuda is stood in for, and memory is the CPU's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_shard.inference import available_memory
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.offload import placement
from fsdp_shard.inference.offload.buffer_ring import Content, GpuRing
from tests.support.tiny import token_batch

_CPU = torch.device("cpu")


class _Stream:
    """A stream that keeps what it is told, under its name."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.what}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    compute, copies = _Stream(found, "compute"), _Stream(found, "copies")
    running = [compute]

    class Event:
        what = "nothing"

        def record(self, stream: _Stream) -> None:
            self.what = f"{stream.name} at {len(found)}"

        def synchronize(self) -> None:
            found.append(f"host waits for {self.what}")

    @contextlib.contextmanager
    def inside(stream: _Stream) -> Any:
        running.append(stream)
        yield
        running.pop()

    copy = torch.Tensor.copy_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            found.append(f"{running[-1].name} copies {int(source[0])}")
        return copy(target, source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append(f"kept for {stream.name}"))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    return found


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the memory that is page-locked."""
    found: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: bool(found.append(address)),
        cudaHostUnregister=found.remove,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def _ring(read: int = 0) -> GpuRing:
    def fill(wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in wanted:
            tensor.fill_(read)

    return GpuRing(_CPU, fill)


def test_a_buffer_is_filled_after_its_use_and_used_after_it_is_filled(log: list[str]) -> None:
    ring = _ring()
    contents = [
        Content((("weight", torch.uint8, (4,)),), torch.full((256,), number, dtype=torch.uint8)) for number in (1, 2)
    ]
    for content in contents:
        ring.fit(content)
    buffer = ring.acquire()
    assert log == ["kept for copies"]
    for content in contents:
        assert content.resident is not None
        del log[:]
        used = buffer.used.what
        ring.load(content, buffer)
        assert log == [f"copies waits for {used}", f"copies copies {int(content.resident[0])}"]
        ring.wait(buffer)
        assert log[-1] == f"compute waits for {buffer.copied.what}"
        assert buffer.copied.what.startswith("copies")
        assert int(buffer.memory[0]) == int(content.resident[0])
        ring.record_use(buffer)
        assert buffer.used.what.startswith("compute")
    ring.release(buffer)
    assert ring.acquire() is buffer


def test_staging_memory_is_written_after_it_has_been_copied(log: list[str], locked: list[int]) -> None:
    ring = _ring(read=3)
    content = Content((("weight", torch.uint8, (4,)),))
    ring.fit(content)
    buffer = ring.acquire()
    ring.load(content, buffer)
    first = buffer.copied.what
    del log[:]
    ring.load(content, buffer)
    assert log[0] == f"host waits for {first}"
    assert log[-1] == "copies copies 3"


def test_staging_memory_fits_what_is_read_and_no_more(log: list[str], locked: list[int]) -> None:
    ring = _ring(read=3)
    resident = Content((("weight", torch.uint8, (5000,)),), torch.ones(5120, dtype=torch.uint8))
    read = Content((("weight", torch.uint8, (1500,)),))
    ring.fit(resident)
    ring.fit(read)
    buffer = ring.acquire()
    ring.load(resident, buffer)
    hosts = [buffer.host]
    assert not locked
    ring.load(read, buffer)
    assert hosts == [None]
    assert buffer.host is not None
    assert (buffer.memory.nbytes, buffer.host.nbytes) == (5120, 1536)
    assert locked == [buffer.host.data_ptr()]
    del ring, buffer
    gc.collect()
    assert not locked


@pytest.mark.parametrize("there", ["cpu", "disk"])
def test_a_model_of_which_a_block_is_streamed_to_the_gpu(
    log: list[str], locked: list[int], monkeypatch: pytest.MonkeyPatch, tiny_model: Path, there: str
) -> None:
    """The whole way of a GPU, whose memory is the CPU's here."""
    expected = load_dispatched(tiny_model, "cpu")(token_batch(0, rows=2)).logits
    monkeypatch.setattr(placement, "device_name", lambda device: "cpu")
    monkeypatch.setattr(available_memory, "check_devices", lambda devices: None)
    del log[:]
    model = load_dispatched(tiny_model, {"*": 0, "model.layers.1": there})
    assert next(model.model.layers[1].parameters()).is_meta
    assert bool(locked) == (there == "cpu")
    for _ in range(3):
        assert torch.equal(model(token_batch(0, rows=2)).logits, expected)
    assert sum(line.startswith("copies copies") for line in log) >= 3
    assert sum(line.startswith("compute waits") for line in log) == 3
    assert locked  # what is copied, or what it is read into
    del model
    gc.collect()
    assert not locked
