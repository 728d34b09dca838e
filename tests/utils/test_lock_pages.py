"""Page-locked memory is unlocked with its tensor, and a refusal is no error of the next kernel."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_shard.utils import empty_pages, lock_pages

_GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the driver, which refuses more than 1,000 bytes; `torch.cuda` is stood in for."""
    found: list[Any] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        found.append(("register", address, num_bytes))
        return 2 if num_bytes > 1000 else 0

    def unregister(address: int) -> None:
        found.append(("unregister", address))

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(found.append(device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("synchronize"))
    return found


def test_memory_is_unlocked_with_its_tensor_and_all_views(calls: list[Any]) -> None:
    memory = empty_pages(1000)  # from a page of the heap, later forks of this process would lack it
    address = memory.data_ptr()
    assert lock_pages(memory, _GPU)
    part = memory[:10]
    del memory
    assert len(calls) == 2
    del part
    assert calls == [_GPU, ("register", address, 1000), _GPU, "synchronize", ("unregister", address)]


def test_a_refusal_is_reported_here_and_nowhere_else(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def launch(count: int, *, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")  # which is how torch clears it

    memory = torch.empty(1001, dtype=torch.uint8)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.warns(UserWarning, match="cuda:1 did not page-lock 0.98 KiB of CPU memory"):
        assert not lock_pages(memory, _GPU)
    assert launched == [_GPU]
    del memory
    assert calls[-1][0] == "register"


def test_a_forked_process_has_no_copy_of_locked_memory(calls: list[Any]) -> None:
    locked, kept = empty_pages(1000).fill_(7), empty_pages(1000).fill_(7)
    assert lock_pages(locked, _GPU)
    ends = {}
    for name, memory in (("locked", locked), ("kept", kept)):
        if not (pid := os.fork()):
            faulthandler.disable()
            os._exit(int(memory[999]))
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ends == {"locked": -signal.SIGSEGV, "kept": 7}
    assert int(locked[999]) == 7


def test_nothing_is_locked_of_nothing(calls: list[Any]) -> None:
    assert not lock_pages(torch.empty(0), _GPU)
    assert calls == []


def test_pages_of_their_own_live_as_long_as_a_view_of_them(calls: list[Any]) -> None:
    blocks = [empty_pages(number) for number in (1, 300, 500, 1000)]
    pages = [block.data_ptr() // mmap.PAGESIZE for block in blocks]
    assert len(set(pages)) == len(blocks)
    assert not any(block.data_ptr() % mmap.PAGESIZE for block in blocks)
    assert lock_pages(blocks[-1], _GPU)
    part = blocks.pop()[990:]
    part.fill_(7)
    assert calls[-1][0] == "register"
    assert part.tolist() == [7] * 10
    del part
    assert calls[-1][0] == "unregister"
    assert empty_pages(0).nbytes == 0
