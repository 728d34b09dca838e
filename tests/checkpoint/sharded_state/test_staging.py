from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_shard.checkpoint.sharded_state.save_step import StepContent
from fsdp_shard.checkpoint.sharded_state.staging import StagedCopy, Staging, _start_transfers
from fsdp_shard.distributed import LocalShard


def shard(tensor: torch.Tensor, *, writes: bool = True) -> LocalShard:
    return LocalShard(tensor, tensor.detach().view(-1), 0, tuple(tensor.shape), writes)


def reading(
    copy: StagedCopy, shard: LocalShard, start: int = 0, stop: int | None = None
) -> AbstractContextManager[memoryview]:
    size, end = shard.data.element_size(), shard.data.numel() if stop is None else stop
    return copy.reading(shard, slice(start * size, end * size))


def values(content: memoryview, dtype: torch.dtype = torch.float32) -> list[float]:
    return [float(value) for value in torch.frombuffer(content, dtype=dtype)]


def read(copy: StagedCopy, shard: LocalShard, start: int = 0, stop: int | None = None) -> list[float]:
    with reading(copy, shard, start, stop) as content:
        return values(content, shard.data.dtype)


def address(content: memoryview) -> int:
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr()


def change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.zero_()


def test_buffers_are_copied_at_once_and_the_rest_before_it_may_change() -> None:
    weight, buffer = nn.Parameter(torch.arange(10.0)), torch.ones(3, dtype=torch.bfloat16)
    step, other = torch.tensor(5.0), nn.Parameter(torch.ones(100))
    state = StepContent(
        {"weight": shard(weight), "buffer": shard(buffer), "other": shard(other, writes=False)},
        {},
        {"weight.step": shard(step)},
        {"trainer.json": b"{}"},
    )
    staging = Staging()
    staged, copy = staging.stage(state)
    change(buffer)  # a forward pass may
    copy.copy_remaining()
    change(weight)
    change(step)
    assert read(copy, staged.weights["weight"]) == list(range(10))
    assert read(copy, staged.weights["buffer"]) == [1, 1, 1]
    assert read(copy, staged.optimizer["weight.step"]) == [5]
    assert len(staged.weights["other"].data) == 0, "another rank writes it, so it takes no memory"
    assert (staged.weights["weight"].shape, staged.model_files) == ((10,), {"trainer.json": b"{}"})


def test_what_is_written_in_time_is_never_copied() -> None:
    early, late, unread = (nn.Parameter(torch.arange(first, first + 4.0)) for first in (0, 10, 20))
    state = StepContent({"early": shard(early), "late": shard(late), "unread": shard(unread)}, {})
    staging = Staging()
    staged, copy = staging.stage(state)
    with reading(copy, staged.weights["early"], 0, 2) as content:
        assert address(content) == early.data_ptr(), "it is read where it lies"
    assert read(copy, staged.weights["early"], 2) == [2, 3]
    assert read(copy, staged.weights["late"], 0, 1) == [10]
    memory = staging._get_memory(0, None)
    memory.fill_(255)
    copy.copy_remaining()
    for tensor in (early, late, unread):
        change(tensor)
    assert set(memory[:16].tolist()) == {255}, "it was all written"
    assert read(copy, staged.weights["late"], 1) == [11, 12, 13]
    with reading(copy, staged.weights["unread"]) as content:
        assert values(content) == [20, 21, 22, 23]
        first = address(content)
    copy.end()
    again, copy = staging.stage(state)
    copy.copy_remaining()
    with reading(copy, again.weights["unread"]) as content:
        assert address(content) == first, "the memory is used again"


def test_weights_do_not_change_while_they_are_read() -> None:
    weight = nn.Parameter(torch.ones(8))
    staged, copy = Staging().stage(StepContent({"weight": shard(weight)}, {}))
    changed = threading.Thread(target=lambda: (copy.copy_remaining(), change(weight)))
    with reading(copy, staged.weights["weight"], 0, 4) as content:
        changed.start()
        changed.join(0.2)
        assert changed.is_alive()
        assert values(content) == [1, 1, 1, 1]
    changed.join(10)
    assert read(copy, staged.weights["weight"], 4) == [1, 1, 1, 1]


def test_a_save_that_has_ended_needs_no_copy() -> None:
    weight = nn.Parameter(torch.ones(8))
    staging = Staging()
    _, copy = staging.stage(StepContent({"weight": shard(weight)}, {}))
    memory = staging._get_memory(0, None).fill_(255)
    copy.end()
    copy.copy_remaining()
    assert set(memory.tolist()) == {255}


def test_the_thread_of_a_save_waits_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0, where waiting would make a context; torch.cuda is stood in for."""
    here = threading.local()
    waited: list[tuple[int, int]] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        here.number = device.index
        yield
        here.number = 0

    ends = {
        torch.device("cuda", number): SimpleNamespace(
            synchronize=lambda number=number: waited.append((number, getattr(here, "number", 0)))
        )
        for number in (1, 2)
    }
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr("fsdp_shard.checkpoint.sharded_state.staging._start_transfers", lambda jobs: ends)
    _, copy = Staging().stage(StepContent({"weight": shard(nn.Parameter(torch.ones(8)))}, {}))
    saving = threading.Thread(target=copy.wait)
    saving.start()
    saving.join()
    assert waited == [(1, 1), (2, 2)]


def test_tensors_of_several_gpus_are_copied_on_a_stream_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events belong to the GPU that is current where they are made; torch.cuda is stood in for."""
    current, log = [0], list[str]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        assert stream.gpu == current[-1]
        yield

    def made() -> Any:
        gpu = current[-1]
        return SimpleNamespace(
            gpu=gpu, wait_stream=lambda other: log.append(f"{gpu} waits for {other}"),
            record=lambda stream: log.append(f"{gpu} ends on {stream.gpu}"),
        )  # fmt: skip

    def source(gpu: int) -> Any:
        return SimpleNamespace(device=torch.device("cuda", gpu), number=gpu)

    def host() -> Any:
        return SimpleNamespace(copy_=lambda source, non_blocking: log.append(f"{current[-1]} copies {source.number}"))

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: f"work of {current[-1]}")
    ends = _start_transfers([(host(), source(number)) for number in (1, 2, 1)])
    assert [device.index for device in ends] == [1, 2]
    assert log == [
        "1 waits for work of 1", "1 copies 1", "1 copies 1", "1 ends on 1",
        "2 waits for work of 2", "2 copies 2", "2 ends on 2",
    ]  # fmt: skip
