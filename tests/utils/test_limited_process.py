"""Work in a process that is ended when it takes too much."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_shard.errors import CheckpointError, DataError, ModelError
from fsdp_shard.utils import LimitedProcess, limited_process, run_limited


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "render_seconds=0.2,render_bytes=64MB,build_seconds=0.2,build_bytes=64MB")


def _loop() -> None:
    while True:
        pass


def _grow() -> list[bytes]:
    return [os.urandom(1 << 20) for _ in range(10_000)]


@pytest.mark.parametrize("kind", ["render", "build"])
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (_loop, "doing it takes too much time: the limit is 0.2 s; .*FSDP_SHARD_LIMITS=KIND_seconds=VALUE"),
        (lambda: re.match("(a+)+$", "a" * 40 + "b"), "takes too much time"),
        (lambda: len("a" * 10**10), "doing it takes too much memory: .*FSDP_SHARD_LIMITS=KIND_bytes=VALUE"),
        (_grow, "takes too much (memory|time)"),
        (lambda: torch.empty(10**10).fill_(1), "takes too much memory"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"ended the process that did it \(SIGKILL\)"),
        (lambda: os._exit(3), r"ended the process that did it \(no signal\)"),
    ],
)
def test_too_much_is_one_error(work: Callable[[], Any], message: str, kind: str) -> None:
    with pytest.raises(ModelError, match=message.replace("KIND", kind)):
        run_limited(work, "doing it", kind=kind, error=ModelError)


def test_results_and_errors_come_back() -> None:
    assert run_limited(lambda: {"a": [1, 2]}, "doing it", error=ModelError) == {"a": [1, 2]}
    with pytest.raises(ModelError, match=r"doing it fails: ValueError: invalid literal for int\(\)"):
        run_limited(lambda: int("x"), "doing it", error=ModelError)
    with pytest.raises(ModelError, match="doing it fails: SystemExit"):
        run_limited(exit, "doing it", error=ModelError)
    with pytest.raises(ModelError, match=r"doing it fails: .*(pickle|local object)"):
        run_limited(lambda: lambda: 1, "doing it", error=ModelError)

    def refuse() -> None:
        raise DataError("ours")

    with pytest.raises(DataError, match=r"^ours$"):
        run_limited(refuse, "doing it", error=ModelError)


def test_the_limits_are_those_of_each_call_and_of_its_size() -> None:
    def burn(seconds: float) -> None:
        deadline = time.process_time() + seconds
        while time.process_time() < deadline:
            pass

    with LimitedProcess[float, None](burn, "burning", error=CheckpointError) as process:
        for _ in range(3):
            process(0.1)
        process(0.5, num_bytes=10 * (32 << 10))
        with pytest.raises(CheckpointError, match="too much time"):
            process(5.0)
        with pytest.raises(CheckpointError, match="ended the process that did it, which was said before"):
            process(0.0)


def test_a_wait_for_ever_takes_too_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "_WALL_SECONDS", 0.1)
    monkeypatch.setattr(limited_process, "_WALL_FACTOR", 1.0)
    with pytest.raises(ModelError, match=r"doing it takes too much time: the limit is 0\.2 s"):
        run_limited(lambda: time.sleep(60), "doing it", error=ModelError)


def test_threads_take_turns() -> None:
    with LimitedProcess[int, int](lambda number: number + 1, "adding", error=ModelError) as process:
        found: list[bool] = []
        threads = [threading.Thread(target=lambda n=n: found.append(process(n) == n + 1)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 50


def test_it_ends_with_its_owner_and_no_other_process_ends_it() -> None:
    process = LimitedProcess[None, int](lambda _: os.getpid(), "asking", error=ModelError)
    pid = process(None)
    child = os.fork()
    if not child:
        process.close()  # another process than the one that began it
        os._exit(0)
    os.waitpid(child, 0)
    assert process(None) == pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class _Cycle:
    """Is ended by the garbage collector only."""

    def __init__(self, group: object) -> None:
        self.group, self.itself = group, self


def test_what_has_threads_is_not_ended_in_the_forked_process() -> None:
    """The end of a process group waits for its threads, which are not forked."""
    gc.disable()
    try:
        _Cycle(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(minutes=1)))
        run_limited(gc.collect, "doing it", error=ModelError)
    finally:
        gc.enable()
