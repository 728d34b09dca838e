"""Work at idle is done as any other, by whom is what these tests are about."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from fsdp_shard.checkpoint import idle
from fsdp_shard.checkpoint.idle import at_idle

has_idle = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has threads that run at idle")


def policies(count: int) -> Iterator[int]:
    """How the thread that does a piece is scheduled, as pieces."""
    for _ in range(count):
        FOUND.append((threading.get_ident(), os.sched_getscheduler(0)))
        yield len(FOUND)


FOUND: list[tuple[int, int]] = []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests keep all cores busy."""
    monkeypatch.setattr(idle, "_PATIENCE_SECONDS", 60.0)
    FOUND.clear()


@has_idle
def test_a_thread_of_its_own_runs_at_idle_and_the_caller_stays_as_it_is() -> None:
    before = os.sched_getscheduler(0)
    at_idle(policies(5))
    assert [policy for _, policy in FOUND] == 5 * [os.SCHED_IDLE]
    assert threading.get_ident() not in dict(FOUND)
    assert os.sched_getscheduler(0) == before


@has_idle
def test_a_thread_that_does_not_get_on_is_relieved_after_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_PATIENCE_SECONDS", 0.2)
    done, may_go_on = [], threading.Event()

    def pieces() -> Iterator[None]:
        for number in range(4):
            if number == 1:
                threading.Timer(0.6, may_go_on.set).start()
                may_go_on.wait(60)  # as where no core is free
            done.append((number, os.sched_getscheduler(0)))
            yield

    at_idle(pieces())
    assert [number for number, _ in done] == [0, 1, 2, 3], "each once, in order"
    at_idle_were = [policy == os.SCHED_IDLE for _, policy in done]
    assert at_idle_were[0]
    assert at_idle_were[2:] == [False, False]


def test_slow_pieces_that_get_on_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_PATIENCE_SECONDS", 1.5)
    done = []

    def pieces() -> Iterator[None]:
        for _ in range(4):
            time.sleep(0.5)
            done.append(threading.get_ident())
            yield

    at_idle(pieces())
    assert done == 4 * done[:1]
    assert done[0] != threading.get_ident()


def test_an_error_of_a_piece_is_the_callers_and_ends_the_work() -> None:
    done = []

    def pieces() -> Iterator[None]:
        for number in range(4):
            if number == 2:
                raise OSError(28, "No space left on device")
            done.append(number)
            yield

    with pytest.raises(OSError, match="No space left"):
        at_idle(pieces())
    assert done == [0, 1]


@has_idle
def test_where_no_thread_may_run_at_idle_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    at_idle(policies(3))
    assert [policy for _, policy in FOUND] == 3 * [before]


def test_nothing_to_do_is_done() -> None:
    at_idle(iter(()))
