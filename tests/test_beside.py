"""A call beside imports: its result, its errors at once, and nothing lost when its process is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

import pytest

from fsdp_shard.beside import call_beside
from fsdp_shard.errors import ConfigError


def test_the_result_comes_from_another_process_while_this_one_works() -> None:
    worked = []
    pid = call_beside(os.getpid, meanwhile=lambda: worked.append(os.getpid()))
    assert worked == [os.getpid()] != [pid]


def test_both_are_done_at_the_same_time() -> None:
    begun = time.perf_counter()
    call_beside(lambda: time.sleep(0.5), meanwhile=lambda: time.sleep(0.5))
    assert time.perf_counter() - begun < 0.9


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_an_error_cuts_short_what_is_done_meanwhile(seconds: float) -> None:
    def fail() -> None:
        time.sleep(seconds)
        raise ConfigError("no such setting")

    def swallow() -> None:
        with_end = time.perf_counter() + 60
        while time.perf_counter() < with_end:
            with suppress(Exception):  # as modules do that try an import
                import_module("fsdp_shard.none_of_this_name")

    before = list(sys.meta_path)
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match=r"^no such setting$"):
        call_beside(fail, meanwhile=swallow)
    assert time.perf_counter() - begun < 10
    assert sys.meta_path == before


@pytest.mark.parametrize(
    "function",
    [
        lambda parent: os.kill(os.getpid(), signal.SIGKILL) if os.getpid() != parent else "here",
        lambda parent: threading.Lock() if os.getpid() != parent else "here",
    ],
    ids=["killed", "not to be pickled"],
)
def test_what_does_not_come_is_computed_here(function: Callable[[int], object]) -> None:
    parent = os.getpid()
    assert call_beside(lambda: function(parent), meanwhile=lambda: None) == "here"


def test_a_parent_that_is_told_of_no_ends_gets_results_and_errors() -> None:
    def imports() -> None:
        time.sleep(0.3)  # the other has ended by then
        with suppress(ImportError):
            import_module("fsdp_shard.none_of_this_name")

    def fail() -> None:
        raise ConfigError("no such setting")

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert call_beside(lambda: 1, meanwhile=imports) == 1
        with pytest.raises(ConfigError, match="no such setting"):
            call_beside(fail, meanwhile=imports)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_signal_to_both_is_heard_here() -> None:
    parent = os.getpid()

    def interrupted() -> None:
        time.sleep(0.3)  # the other has ended by then
        raise KeyboardInterrupt

    def end() -> None:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        call_beside(end, meanwhile=interrupted)


def test_more_than_a_pipe_holds_comes_whole() -> None:
    assert len(call_beside(lambda: b"x" * 1_000_000, meanwhile=lambda: time.sleep(0.1))) == 1_000_000


def test_an_error_of_what_is_done_meanwhile_is_raised() -> None:
    def broken() -> None:
        raise ImportError("torch is broken")

    before = list(sys.meta_path)
    with pytest.raises(ImportError, match="torch is broken"):
        call_beside(lambda: 1, meanwhile=broken)
    assert sys.meta_path == before


def test_a_command_composes_its_config_while_its_recipe_is_imported() -> None:
    program = """
import os, sys
from fsdp_shard import compose, recipe
mine, inner = os.getpid(), compose.compose
compose.compose = lambda *words: print("composed elsewhere:", os.getpid() != mine, flush=True) or inner(*words)
sys.argv = ["fsdp-shard", "plan", *sys.argv[1:]]
from fsdp_shard.cli import main
main()
"""
    for words, elsewhere in ((["model.pat=x"], True), (["model.pat=x", "--debug"], False)):
        ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert ended.stdout == f"composed elsewhere: {elsewhere}\n"
        assert ended.returncode == 2
        assert "model.pat is no setting of plan" in ended.stderr
