"""The process group and the device of this rank: the only place that starts or ends them.

Everything else is handed a `DistributedContext` and calls its collectives; nothing reads RANK or WORLD_SIZE itself.
Knows nothing of models, wrappers or checkpoints.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_shard.errors import FsdpShardError, StorageError

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """Who this rank is: its place in the world, its device, and the mesh [replicate, shard] of all ranks.

    Its collectives are those of `group`, a process group over all ranks; None is the default one.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        return int(self.mesh.size(0))

    def beside(self, timeout_seconds: float) -> DistributedContext:
        """The same ranks with a gloo group and a timeout of their own, for use by another thread; a collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        return replace(self, group=group)

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank; small Python objects only."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_object(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on rank 0; an empty list elsewhere."""
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """`value` as rank `source` has it, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    def together(self, work: Callable[[], T]) -> T:
        """`work()` of this rank; what it raises on any rank is raised on every rank, so that none goes on alone.

        Only errors of ours and of the operating system are shared: anything else is a bug and ends its rank.
        """
        value: T | None = None
        error: FsdpShardError | None = None
        try:
            value = work()
        except FsdpShardError as ours:
            error = ours
        except OSError as system:
            code = errno.errorcode.get(system.errno or 0, "no errno")
            what = f"{system.filename or 'a file'}: {system.strerror or system} ({code})"
            error = StorageError(f"Rank {self.rank}: {what}.")
        first = next((found for found in self.all_gather_object(error) if found is not None), None)
        if first is not None:
            raise first
        return value  # type: ignore[return-value]  # no error, so work() gave it

    def decide(self, work: Callable[[], T]) -> T:
        """What `work()` is on rank 0, on every rank: for looking at a disk, which two ranks may see at two moments.

        Errors of ours and of the operating system are raised on every rank.
        """
        return self.broadcast_object(self.together(lambda: work() if self.is_main else None))  # type: ignore[no-any-return]

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        """The element-wise `sum`, `max` or `min` of `values` over the ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()), group=self.group)
        return [float(value) for value in tensor]


@contextmanager
def distributed(
    device: str = "auto", replicas: int = 1, timeout_seconds: float = 1800.0, rendezvous: str = "env://"
) -> Iterator[DistributedContext]:
    """Join the ranks that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*), or be a world of one.

    `device` is auto, cpu or cuda; auto takes a GPU when there is one. `replicas` groups of ranks hold a copy of the
    model each (HSDP). A collective that waits longer than `timeout_seconds` raises instead of hanging.
    """
    rank, world_size, local_rank = (int(os.environ.get(k, v)) for k, v in _ALONE.items())
    assert world_size % replicas == 0, (world_size, replicas)
    where = _place(device, local_rank)
    timeout = timedelta(seconds=timeout_seconds)
    # Objects and flags are reduced on the CPU even when the model is on GPUs; clipping offloaded gradients needs both.
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=_memory_store(), rank=0, world_size=1, timeout=timeout)
    try:
        shape = (replicas, world_size // replicas)
        mesh = init_device_mesh(where.type, shape, mesh_dim_names=("replicate", "shard"))
        yield DistributedContext(rank, local_rank, world_size, where, mesh)
    finally:
        dist.destroy_process_group()


def _memory_store() -> Any:
    from torch._C._distributed_c10d import HashStore

    return HashStore()


_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _place(device: str, local_rank: int) -> torch.device:
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
