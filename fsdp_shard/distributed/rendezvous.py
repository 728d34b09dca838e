"""Where the launchers of a run's machines meet: torch's c10d rendezvous, and how they take leave of each other.

Three things are added to torch's. Each round has a number that all machines know, under which its ranks keep their keys
apart from those of a dead attempt: torch lets both use one store. The machine that serves the store waits at the end
until the others have left it: where it goes first, they find a broken connection instead of an end. And each round is
told anew where its ranks meet, so that machines can come and go. Knows no rank.
"""

from __future__ import annotations

import socket
import uuid
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from fsdp_shard.distributed.process_group import ATTEMPT_KEY, leave_store

_SECONDS_TO_LEAVE = 15.0
# Machines beyond the fewest that are needed are waited for this long, in each round.
_LAST_CALL_SECONDS = 10


class Meeting(RendezvousHandler):
    """The rendezvous of the machines of one run; with `endpoint` None, of this machine alone."""

    def __init__(self, min_nodes: int, max_nodes: int, endpoint: str | None) -> None:
        alone = endpoint is None
        # Machines of one run meet at one endpoint, so the name only has to be the same there.
        name = uuid.uuid4().hex if alone else "fsdp-shard"
        self._is_host = alone or _is_here(str(endpoint))
        where: dict[str, Any] = {
            "backend": "c10d",
            "endpoint": endpoint or "127.0.0.1:0",
            "run_id": name,
            "min_nodes": min_nodes,
            "max_nodes": max_nodes,
            "local_addr": "127.0.0.1" if alone else None,
            "last_call_timeout": _LAST_CALL_SECONDS,
        }
        try:
            parameters = RendezvousParameters(**where, is_host=self._is_host)
            backend, store = create_backend(parameters)
        except RendezvousConnectionError:
            if not self._is_host:
                raise
            # Another machine of this run is a process here, and was first.
            self._is_host = False
            parameters = RendezvousParameters(**where, is_host=False)
            backend, store = create_backend(parameters)
        self.local_addr: str | None = parameters.local_addr
        self._store: Store = store
        self._torch: RendezvousHandler = create_handler(store, backend, parameters)
        self._round: RendezvousInfo | None = None

    def first_value(self, name: str, value: str) -> str:
        """`value` as the first machine that asked gave it: the same on all machines, in every round."""
        return bytes(self._store.compare_set(f"fsdp-shard/{name}", "", value)).decode()

    def next_rendezvous(self) -> RendezvousInfo:
        self._round = _with_address(self._torch.next_rendezvous())
        # Keys in the round's store are this round's own; the counter is the run's.
        if self._round.rank == 0:
            self._round.store.set(ATTEMPT_KEY, str(self._store.add("fsdp-shard/attempts", 1)))
        return self._round

    def leave(self) -> None:
        """Count this machine out of its last round; the one that serves the store waits for the others, not for ever.

        After this, nothing here may touch the store.
        """
        if self._round is not None:
            leave_store(self._round.store, self._round.world_size, serves=self._is_host, seconds=_SECONDS_TO_LEAVE)

    # The rest is torch's.

    @property
    def use_agent_store(self) -> bool:
        return self._torch.use_agent_store

    def get_backend(self) -> str:
        return self._torch.get_backend()

    def is_closed(self) -> bool:
        return self._torch.is_closed()

    def set_closed(self) -> None:
        self._torch.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._torch.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._torch.get_run_id()

    def shutdown(self) -> bool:
        return self._torch.shutdown()


def _with_address(found: RendezvousInfo) -> RendezvousInfo:
    """The round with the address of the store of its own first machine, which that one says here in every round.

    torch's says it only in the round in which it makes the store, and the others keep the first address they heard: a
    machine that comes later would wait for it in vain, and one that stays would look for a machine that has gone.
    """
    known = found.bootstrap_store_info
    assert known is not None, "torch's c10d rendezvous always gives one"
    told = RendezvousStoreInfo.build(found.rank, found.store, known.master_addr, known.master_port)
    return RendezvousInfo(found.store, found.rank, found.world_size, told)


def _is_here(endpoint: str) -> bool:
    """Whether the host of host:port is this machine: one of its names, or an address that a socket here can have."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
    return True
