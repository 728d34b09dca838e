"""The first signal asks, a later second one insists, and what comes right after the first is its echo."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator

import pytest

from fsdp_shard.distributed import STOP_SIGNALS
from fsdp_shard.errors import Interrupted
from fsdp_shard.training.stop_signal import StopSignal


@pytest.fixture(autouse=True)
def _nothing_ignored() -> Iterator[None]:
    """Signals have their usual handlers: tests that run in the background or under nohup inherit ignored ones."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_sets_a_flag(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.number == 0
        os.kill(os.getpid(), number)
        assert stop.number == number


def test_an_echo_is_the_same_request() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGINT


def test_a_second_signal_ends_it() -> None:
    with StopSignal(grace_seconds=0.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        with pytest.raises(Interrupted, match="second signal") as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.value.exit_status == 130
        told = pickle.loads(pickle.dumps(caught.value))  # as ranks tell each other
        assert (str(told), told.exit_status) == (str(caught.value), 130)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignal():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
