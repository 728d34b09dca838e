"""Machines that meet, and one that comes later: each round has the address at which its own ranks meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fsdp_shard.distributed import LaunchConfig, rendezvous
from fsdp_shard.distributed.key_value_store import ATTEMPT
from tests.support.commands import free_port

_ROOT = Path(__file__).resolve().parent.parent.parent
_Round = tuple[int, int, str, int, str]  # rank, machines, address and port of the store, number


def _join(machine: rendezvous.Rendezvous) -> _Round:
    found = machine.next_rendezvous()
    where = found.bootstrap_store_info
    assert where is not None
    number = bytes(found.store.get("fsdp-shard/attempt")).decode()
    return found.rank, found.world_size, where.master_addr, where.master_port, number


def one_comes_later() -> list[_Round]:
    rendezvous._LAST_CALL_SECONDS = 1
    settings = LaunchConfig(nodes="1:2", rendezvous=f"localhost:{free_port()}")
    first = rendezvous.Rendezvous.create(settings)
    alone = _join(first)
    later = rendezvous.Rendezvous.create(settings)
    rounds: list[_Round] = []
    coming = threading.Thread(target=lambda: rounds.append(_join(later)), daemon=True)
    coming.start()
    deadline = time.monotonic() + 30
    while not first.num_nodes_waiting():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rounds.append(_join(first))
    coming.join(30)
    assert not coming.is_alive(), "it waits for the address for ever"
    assert ATTEMPT not in os.environ
    return [alone, *sorted(rounds)]


@pytest.mark.long
def test_a_machine_that_comes_later_learns_where_the_ranks_meet() -> None:
    # A process of its own that was not forked: the tests before this one leave threads, and torch's store makes some.
    module = "tests.distributed.test_rendezvous"
    program = f"import json; from {module} import one_comes_later; print(json.dumps(one_comes_later()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, one, other = json.loads(done.stdout)
    assert (alone[:2], alone[4]) == ([0, 1], "1")
    assert [(found[:2], found[4]) for found in (one, other)] == [([0, 2], "2"), ([1, 2], "2")]
    assert one[2:4] == other[2:4], "both know the same store"
