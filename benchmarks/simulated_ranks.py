"""Many ranks of one save as threads of one process: the real code, with what each rank sends and opens counted.

Collectives hand Python objects from thread to thread. What they would send is the size of the pickled objects; the
processor time of a rank is that of its thread, so that ranks which wait cost nothing. One rank works at a time: a
thousand threads that want Python's lock would wake each other up without end.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fsdp_shard.distributed import Communicator

_STACK_BYTES = 512 << 10  # of a thread; there are thousands
NUM_MEASURED = 8  # ranks that unpickle what they receive themselves; the others take what rank 0 made of it


class _Meeting:
    """Where the ranks of a group hand over what they send."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.loaded: list[Any] = []
        self.barrier = threading.Barrier(world_size)
        self.turn = threading.Lock()
        self.received: Counter[int] = Counter()

    def wait(self) -> None:
        """Let others work until all ranks are here."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self.values[rank] = value
        self.wait()
        found = list(self.values)
        self.wait()
        return found


class _OneDimension:
    """The mesh of the ranks, of which a save records the sizes."""

    def __init__(self, world_size: int) -> None:
        self.mesh_dim_names, self._size = ("shard",), world_size

    def size(self, dim: int = 0) -> int:
        """Number of ranks."""
        return self._size


@dataclass(frozen=True, kw_only=True)
class SimulatedRank(Communicator):
    """A rank whose collectives are meetings of threads; sizes are those that gloo receives."""

    meeting: _Meeting
    mesh: Any

    def with_new_group(self, timeout_seconds: float) -> SimulatedRank:
        return replace(self)

    def barrier(self) -> None:
        self.meeting.exchange(self.rank, None)

    def all_gather_object(self, value: Any) -> list[Any]:
        found = self.meeting.exchange(self.rank, pickle.dumps(value))
        self.meeting.received[self.rank] += len(found) * max(map(len, found))  # all are padded to the largest
        own = [pickle.loads(each) for each in found] if self.rank < NUM_MEASURED else []
        if self.is_main:
            self.meeting.loaded = own
        self.meeting.wait()
        return own or list(self.meeting.loaded)

    def gather_object(self, value: Any) -> list[Any]:
        found = self.meeting.exchange(self.rank, pickle.dumps(value))
        if not self.is_main:
            return []
        self.meeting.received[0] += len(found) * max(map(len, found))
        return [pickle.loads(each) for each in found]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        found = self.meeting.exchange(self.rank, pickle.dumps(value) if self.rank == source else b"")[source]
        self.meeting.received[self.rank] += len(found)
        return pickle.loads(found)

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        found = self.meeting.exchange(self.rank, values)
        self.meeting.received[self.rank] += 16 * len(values)  # once to reduce and once to gather, in rings
        operations: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
        return [operations[operation](column) for column in zip(*found, strict=True)]


@dataclass(frozen=True)
class RankCost:
    """What one rank did: seconds of processor, opens of rank files, and bytes received."""

    cpu_seconds: float
    opened: int
    received: int


def simulate(world_size: int, work: Callable[[SimulatedRank], None]) -> list[RankCost]:
    """Run `work` on each of `world_size` ranks at the same time; the first error is raised."""
    opens: Counter[int] = Counter()
    by_thread: dict[int, int] = {}
    is_over = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not is_over and "shard-" in str(arguments[0]):
            rank = by_thread.get(threading.get_ident())
            if rank is not None:
                opens[rank] += 1

    sys.addaudithook(note)
    meeting, seconds, errors = _Meeting(world_size), [0.0] * world_size, []

    def run(rank: int) -> None:
        by_thread[threading.get_ident()] = rank
        context = SimulatedRank(rank=rank, world_size=world_size, meeting=meeting, mesh=_OneDimension(world_size))
        try:
            with meeting.turn:
                work(context)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()
        seconds[rank] = time.thread_time()

    threading.stack_size(_STACK_BYTES)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    is_over = True
    if errors:
        raise errors[0]
    return [RankCost(seconds[rank], opens[rank], meeting.received[rank]) for rank in range(world_size)]
