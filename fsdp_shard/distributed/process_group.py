"""The process group and the device of this rank: the only place that starts or ends them.

Everything else is handed a `DistributedContext` and calls its collectives; nothing reads RANK or WORLD_SIZE itself.
Knows nothing of models, wrappers or checkpoints.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous as meet

from fsdp_shard.errors import FsdpShardError, StorageError

T = TypeVar("T")

ATTEMPT = "FSDP_SHARD_ATTEMPT"  # set for its ranks by our launcher
ATTEMPT_KEY = "fsdp-shard/attempt"  # the same, in the store through which the launchers meet


@dataclass(frozen=True)
class DistributedContext:
    """Who this rank is: its place in the world, its device, and the mesh [replicate, shard] of all ranks, or
    [replicate, shard, tensor] where a model's layers are divided too.

    Where the experts of a mixture are divided, `expert_mesh` is another view of the same ranks, for them alone:
    [replicate, shard, expert, tensor], the last always of size 1.

    Its collectives are those of `group`, a process group over all ranks; None is the default one.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    group: Any = None
    expert_mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        return int(self.mesh.size(0))

    @property
    def num_tensor_ranks(self) -> int:
        """Ranks next to each other that compute one layer together, and so see the same samples."""
        return int(self.mesh.size(2)) if self.mesh.ndim > 2 else 1

    @property
    def num_expert_ranks(self) -> int:
        """Ranks next to each other that hold the experts of a mixture together; each sees samples of its own."""
        return int(self.expert_mesh.size(2)) if self.expert_mesh is not None else 1

    @property
    def divides_modules(self) -> bool:
        """Whether parameters lie on several meshes, as some modules are divided beside being sharded."""
        return self.num_tensor_ranks > 1 or self.num_expert_ranks > 1

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank sees, of `num_data_ranks`."""
        return self.rank // self.num_tensor_ranks

    @property
    def num_data_ranks(self) -> int:
        return self.world_size // self.num_tensor_ranks

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
        value: T = self.broadcast_object(self.together(lambda: work() if self.is_main else None))
        return value

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        """The element-wise `sum`, `max` or `min` of `values` over the ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()), group=self.group)
        return [float(value) for value in tensor]


@contextmanager
def distributed(
    device: str = "auto",
    replicas: int = 1,
    timeout_seconds: float = 1800.0,
    rendezvous: str = "env://",
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
) -> Iterator[DistributedContext]:
    """Join the ranks that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*), or be a world of one.

    `device` is auto, cpu or cuda; auto takes a GPU when there is one. `replicas` groups of ranks hold a copy of the
    model each (HSDP); `tensor_parallel` neighbors divide each layer, or `expert_parallel` of them the experts of a
    mixture. A collective that waits longer than `timeout_seconds` raises instead of hanging.
    """
    rank, world_size, local_rank = (int(os.environ.get(k, v)) for k, v in _ALONE.items())
    assert 1 in (tensor_parallel, expert_parallel), "these two are not combined"
    divided = replicas * tensor_parallel * expert_parallel
    assert world_size % divided == 0, (world_size, replicas, tensor_parallel, expert_parallel)
    where = _place(device, local_rank)
    timeout = timedelta(seconds=timeout_seconds)
    # Objects and flags are reduced on the CPU even when the model is on GPUs; clipping offloaded gradients needs both.
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    store = join_store(rendezvous, timeout_seconds) if "RANK" in os.environ else HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        shape: tuple[int, ...] = (replicas, world_size // (replicas * tensor_parallel))
        names: tuple[str, ...] = ("replicate", "shard")
        if tensor_parallel > 1:
            shape, names = (*shape, tensor_parallel), (*names, "tensor")
        mesh = init_device_mesh(where.type, shape, mesh_dim_names=names)
        expert_mesh = None
        if expert_parallel > 1:
            shape = (replicas, world_size // divided, expert_parallel, 1)
            names = ("replicate", "shard", "expert", "tensor")
            expert_mesh = init_device_mesh(where.type, shape, mesh_dim_names=names)
        yield DistributedContext(rank, local_rank, world_size, where, mesh, expert_mesh=expert_mesh)
    finally:
        dist.destroy_process_group()


def join_store(rendezvous: str = "env://", timeout_seconds: float = 300.0) -> Store:
    """The store through which the ranks find each other; a restarted attempt never meets the keys of a dead one."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = {} if rendezvous == "env://" else {"rank": rank, "world_size": world_size}
    store, _, _ = next(meet(rendezvous, timeout=timedelta(seconds=timeout_seconds), **where))
    return PrefixStore(f"fsdp-shard/attempt-{attempt()}", store)


def attempt() -> str:
    """Which attempt of the run this is, the same on all its ranks: 1, 2, ... under our own launcher.

    torchrun counts restarts on each machine for itself, so on several machines its number cannot be relied on.
    """
    if ATTEMPT in os.environ:
        return os.environ[ATTEMPT]
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"


def is_restarted() -> bool:
    """Whether the ranks of this run were started before, and failed or became more or fewer."""
    return int(attempt()) > (1 if ATTEMPT in os.environ else 0)


def leave_store(store: Store, num_members: int, *, serves: bool, seconds: float) -> None:
    """Say that this member will not use `store` again; the one that `serves` it waits for the others, up to `seconds`.

    A store that is gone already is no error: there is nobody left to wait for.
    """
    try:
        wait_for_members(store, "fsdp-shard/left", num_members if serves else 1, seconds)
    except (RuntimeError, ValueError):
        return


def wait_for_members(store: Store, key: str, num_members: int, seconds: float) -> None:
    """Count this member under `key`, and wait until `num_members` have been, or for `seconds`."""
    deadline = time.monotonic() + seconds
    num_there = store.add(key, 1)
    while num_there < num_members and time.monotonic() < deadline:
        time.sleep(0.02)
        num_there = store.add(key, 0)


_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _place(device: str, local_rank: int) -> torch.device:
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
