"""The rendezvous between the launchers of a run's machines: torch's c10d rendezvous with four additions.

First, each round has a number known to all machines, which separates the keys of its ranks from those of a dead
attempt, as torch lets both use one store. Second, the machine that serves the store waits at the end until the others
have left it; otherwise they would find a broken connection. Third, each round announces its ranks' meeting point again,
so that machines can join and leave. Fourth, if the number of machines may change, the others restart without a machine
that no longer responds: its connections stay open, so ranks would wait for it until a collective times out.
"""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.distributed.elastic_private import CountingRendezvous
from fsdp_shard.distributed.key_value_store import ATTEMPT_KEY, leave_store

_SECONDS_TO_LEAVE = 15.0
# How long each round waits for more machines than the minimum.
_LAST_CALL_SECONDS = 10
# A machine whose ranks have failed also leaves the round, to join the next one; by then, its peers have failed, too.
_SECONDS_UNTIL_LOST = 10.0


class Rendezvous(CountingRendezvous):
    """The rendezvous of the machines of one run; without an endpoint, of only this machine."""

    _run_store: Store
    _is_host: bool
    _is_elastic: bool
    _round: elastic.RendezvousInfo | None = None
    _complete: float = 0.0
    local_addr: str | None

    @classmethod
    def create(cls, settings: LaunchConfig) -> Rendezvous:
        """Connect to the rendezvous of the run described by `settings`, or serve it."""
        endpoint = settings.rendezvous if settings.max_nodes > 1 else None
        # Machines of one run meet at one endpoint, so the run's name only has to be the same there.
        run_id, local_addr = ("fsdp-shard", None) if endpoint else (uuid.uuid4().hex, "127.0.0.1")
        nodes = settings.min_nodes, settings.max_nodes

        def connect(is_host: bool) -> Rendezvous:
            address = endpoint or "127.0.0.1:0"
            parameters = elastic.RendezvousParameters("c10d", address, run_id, *nodes, local_addr, is_host=is_host)
            backend, store = create_backend(parameters)
            timeout = RendezvousTimeout(last_call=timedelta(seconds=_LAST_CALL_SECONDS))
            found: Rendezvous = cls.from_backend(run_id, store, backend, *nodes, local_addr, timeout)
            found._run_store, found._is_host, found.local_addr = store, is_host, local_addr
            found._is_elastic = settings.is_elastic
            return found

        is_host = endpoint is None or is_this_machine(endpoint)
        try:
            return connect(is_host)
        except elastic.RendezvousConnectionError:
            if not is_host:
                raise
            return connect(False)  # another launcher of this run on this machine was first

    def first_value(self, name: str, value: str) -> str:
        """Return the `value` of the first machine that called this: the same on all machines, in every round."""
        return bytes(self._run_store.compare_set(f"fsdp-shard/{name}", "", value)).decode()

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        self._round = _with_address(super().next_rendezvous())
        # Keys in the round's store belong to the round; the counter belongs to the run.
        if self._round.rank == 0:
            self._round.store.set(ATTEMPT_KEY, str(self._run_store.add("fsdp-shard/attempts", 1)))
        self._complete = time.monotonic()
        return self._round

    def num_nodes_waiting(self) -> int:
        """Return the number of machines that wait for a new round or are lost: both end this one."""
        waiting, now = super().num_nodes_waiting(), time.monotonic()
        num_lost = self._round.world_size - self.num_participants() if self._round and self._is_elastic else 0
        if num_lost == 0:
            self._complete = now
        return waiting + (num_lost if now - self._complete > _SECONDS_UNTIL_LOST else 0)

    def leave(self) -> None:
        """Leave the last round; the machine that serves the store waits for the others for a while.

        The store must not be used after this.
        """
        if self._round is not None:
            leave_store(self._round.store, self._round.world_size, serves=self._is_host, seconds=_SECONDS_TO_LEAVE)


def _with_address(found: elastic.RendezvousInfo) -> elastic.RendezvousInfo:
    """Return the round with the store address of its first machine, which announces it in every round.

    torch announces it only in the round in which it creates the store, and the others keep the first address: a machine
    that joins later would wait for it forever, and one that stays would look for a machine that has left.
    """
    known = found.bootstrap_store_info
    assert known is not None, "torch's c10d rendezvous always gives one"
    announced = elastic.RendezvousStoreInfo.build(found.rank, found.store, known.master_addr, known.master_port)
    return elastic.RendezvousInfo(found.store, found.rank, found.world_size, announced)


def is_this_machine(endpoint: str) -> bool:
    """Return whether the host of host:port is this machine, by name or by an address that it can bind."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.create_server((host, 0), family=family):
            return True
    return False
