"""The process group and the device of this rank, and the key-value store through which ranks find each other.

Everything else gets a `DistributedContext` and calls its collectives; only launchers read RANK or WORLD_SIZE too.
"""

import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from fsdp_shard.distributed.config import LONGEST_TIMEOUT_SECONDS
from fsdp_shard.distributed.hardware import init_device
from fsdp_shard.distributed.started_ranks import number_in
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import clear_sharding_caches

# For ranks that wait while one of them tokenizes, or reads all weights. The death of a rank is noticed at once, and a
# hang by the launcher.
LONG_WAIT_SECONDS = LONGEST_TIMEOUT_SECONDS
_SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
ATTEMPT = "FSDP_SHARD_ATTEMPT"  # set for its ranks by our launcher
ATTEMPT_KEY = "fsdp-shard/attempt"  # the same, in the store through which the launchers meet
_calls = itertools.count()  # of `join_store` in this process


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """This rank among all ranks, and collectives on Python objects and small lists of numbers.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of ranks.
        group: Process group over all ranks; None is the default one.
    """

    rank: int
    world_size: int
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this machine; all ranks, if whoever started them does not say."""
        return number_in(os.environ, "LOCAL_WORLD_SIZE", str(self.world_size))

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The sizes of the dimensions that the ranks are arranged in, by name; empty if that is not known."""
        return {}

    def with_new_group(self, timeout_seconds: float) -> Self:
        """Return the same ranks with a gloo group and timeout of their own, for use by another thread. A collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        return replace(self, group=group)

    def destroy_group(self) -> None:
        """Destroy the group that `with_new_group` made, after its last use; its threads end with the last reference."""
        if dist.is_initialized():
            with suppress(ValueError):  # it was destroyed with all others
                dist.destroy_process_group(self.group)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        dist.barrier(group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return `value` of every rank, in rank order, on every rank. For small Python objects only."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_object(self, value: Any) -> list[Any]:
        """Return `value` of every rank, in rank order, on rank 0, and an empty list on the others."""
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def send_rows(self, rows: torch.Tensor, source: int, destination: int, num_rows: int) -> torch.Tensor:
        """Send rows from one rank to another; a collective.

        All ranks take part, since NCCL may make a communicator for each pair of ranks that send and receive alone.

        Args:
            rows: On rank `source`, what is sent, [num_rows, ...]; elsewhere no rows, [0, ...] of the same dtype.
            source: The rank that sends.
            destination: The rank that receives.
            num_rows: Number of rows that are sent.

        Returns:
            The rows on rank `destination`, no rows elsewhere. `rows` itself if a rank keeps its own.
        """
        if source == destination:
            return rows
        sent, received = [0] * self.world_size, [0] * self.world_size
        sent[destination] = num_rows if self.rank == source else 0
        received[source] = num_rows if self.rank == destination else 0
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return `value` of rank `source` on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        """Return the element-wise `sum`, `max` or `min` of `values` over the ranks, computed in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self.all_reduce_(tensor, operation)
        return [float(value) for value in tensor]

    def all_reduce_(self, tensor: torch.Tensor, operation: str = "sum") -> None:
        """Replace `tensor` by its element-wise `sum`, `max` or `min` over the ranks; on a GPU, without waiting."""
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()), group=self.group)


class SendsNothing(Communicator):
    """A rank that waits for no others: every collective returns its own values."""

    def with_new_group(self, timeout_seconds: float) -> Self:
        return self

    def destroy_group(self) -> None:
        return

    def barrier(self) -> None:
        return

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size if self.is_main else []

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value


@dataclass(frozen=True, kw_only=True)
class OnlyRank(SendsNothing):
    """A process that is the only rank, and needs no process group."""

    rank: int = 0
    world_size: int = 1

    @property
    def local_world_size(self) -> int:
        return 1

    def all_reduce_(self, tensor: torch.Tensor, operation: str = "sum") -> None:
        return


def current_ranks(timeout_seconds: float) -> Communicator:
    """The ranks of the process group that this process is in, with a gloo group of their own; a collective.

    Args:
        timeout_seconds: Timeout of the new group.

    Raises:
        ConfigError: This process is one of several ranks, according to WORLD_SIZE, but has no process group yet.
    """
    if dist.is_initialized():
        ranks = Communicator(rank=dist.get_rank(), world_size=dist.get_world_size())
        return ranks.with_new_group(timeout_seconds)
    if (world_size := number_in(os.environ, "WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"This process is one of {world_size} ranks (WORLD_SIZE={world_size}), but has no process group yet; call "
            f"torch.distributed.init_process_group() or fsdp_shard.init_distributed() first."
        )
    return OnlyRank()


@contextmanager
def temporary_ranks(timeout_seconds: float) -> Iterator[Communicator]:
    """`current_ranks`, whose group is destroyed when the block ends; a collective."""
    ranks = current_ranks(timeout_seconds)
    try:
        yield ranks
    finally:
        ranks.destroy_group()


@dataclass(frozen=True, kw_only=True)
class DistributedContext(Communicator):
    """This rank among all ranks, its device, and the meshes that divide a model over the ranks.

    Example:
        >>> with fsdp_shard.init_distributed() as context:  # doctest: +SKIP
        ...     own_rows = batch.chunk(context.num_data_ranks)[context.data_rank].to(context.device)

    Attributes:
        local_rank: Rank of this process on its machine.
        device: Device of this rank.
        mesh: All ranks as [replicate, shard], or as [replicate, shard, tensor] with tensor parallelism.
        expert_mesh: With expert parallelism, the same ranks as [replicate, shard, expert, tensor] for the experts; the
            last dimension has size 1.
        num_context_ranks: Number of adjacent ranks that divide each sequence, and so see the same samples.
        context_group: With more than one of them, the process group of those around this rank.
        timeout_seconds: Timeout for collectives, of meshes that are made later.
    """

    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    num_context_ranks: int = 1
    context_group: Any = None
    timeout_seconds: float = 1800.0
    _neighbor_meshes: dict[int, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The sizes of the dimensions of `mesh`, by name."""
        return {str(name): int(self.mesh.size(dim)) for dim, name in enumerate(self.mesh.mesh_dim_names or ())}

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model (HSDP)."""
        return int(self.mesh.size(0))

    @property
    def num_tensor_ranks(self) -> int:
        """Number of adjacent ranks that compute a layer together, and so see the same samples."""
        return int(self.mesh.size(2)) if self.mesh.ndim > 2 else 1

    @property
    def num_expert_ranks(self) -> int:
        """Number of adjacent ranks that hold the experts of a mixture together; each sees samples of its own."""
        return int(self.expert_mesh.size(2)) if self.expert_mesh is not None else 1

    @property
    def divides_modules(self) -> bool:
        """Whether parameters are on several meshes, because some modules are divided as well as sharded."""
        return self.num_tensor_ranks > 1 or self.num_expert_ranks > 1

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank sees, of `num_data_ranks`."""
        return self.rank // (self.num_tensor_ranks * self.num_context_ranks)

    @property
    def num_data_ranks(self) -> int:
        """Number of parts that a batch is divided into."""
        return self.world_size // (self.num_tensor_ranks * self.num_context_ranks)

    def neighbor_mesh(self, size: int) -> DeviceMesh:
        """All ranks as [replicate, shard] with `size` neighbors in `shard`; the first call is a collective."""
        if size not in self._neighbor_meshes:
            shape = {"replicate": self.world_size // size, "shard": size}
            self._neighbor_meshes[size] = self._new_mesh(shape)
        return self._neighbor_meshes[size]

    def _new_mesh(self, shape: dict[str, int]) -> DeviceMesh:
        return _make_mesh(self.device.type, shape, timedelta(seconds=self.timeout_seconds))

    def undivided(self) -> Self:
        """Return the same ranks for a model that each of them has as a whole."""
        return self if self.num_tensor_ranks == 1 else replace(self, mesh=self.mesh["replicate", "shard"])

    @property
    def random_rank(self) -> int:
        """The rank among those that draw random numbers of their own: all but those that divide layers."""
        return self.rank // self.num_tensor_ranks


@contextmanager
def init_distributed(
    device: str = "auto",
    replicas: int = 1,
    timeout_seconds: float = 1800.0,
    rendezvous: str = "env://",
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
) -> Iterator[DistributedContext]:
    """Initialize the process group of the ranks that the environment describes, and destroy it at the end.

    An existing process group is joined and not destroyed; `timeout_seconds` then applies to mesh groups only. Otherwise
    torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*) describe the ranks; without them, this process is the
    only rank. A rank among others that fails keeps its group, and its process should end: under NCCL, destroying the
    group may wait for peers that wait for this rank in a collective, and the error must be reported first.

    Args:
        device: auto, cpu or cuda; auto uses a GPU if there is one.
        replicas: Number of copies of the model (HSDP).
        timeout_seconds: Timeout of collectives in all groups, in seconds.
        rendezvous: Init method of the process group, such as `env://` or `file:///path`.
        tensor_parallel: Number of adjacent ranks that divide each layer.
        expert_parallel: Number of adjacent ranks that divide the experts of a mixture; not with `tensor_parallel`.
        context_parallel: Number of adjacent ranks that divide each sequence; with neither of the two.

    Yields:
        The ranks: `rank`, `world_size`, `is_main`, and the `device` of this rank. A batch belongs to `num_data_ranks`
        ranks or groups of ranks, of which this one is `data_rank`. Collectives such as `all_reduce_` and `barrier`.

    Raises:
        ConfigError: The ranks cannot be divided as asked, or the environment does not say which rank this is.

    Example:
        >>> with fsdp_shard.init_distributed() as context:  # doctest: +SKIP
        ...     print(context.rank, context.world_size, context.device)
    """
    rank, world_size, local_rank = (number_in(os.environ, name, default) for name, default in _SINGLE_RANK.items())
    if is_joined := dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        _check_rank_is_set()
    parallel = (tensor_parallel, expert_parallel, context_parallel)
    _check_sizes(world_size, replicas, *parallel)
    torch_device, timeout = init_device(device, local_rank), timedelta(seconds=timeout_seconds)
    if is_joined:
        _check_backend(torch_device)
    else:
        _init_process_group(rendezvous, rank, world_size, timeout, torch_device)
    is_done = False
    try:
        groups = _groups(world_size, replicas, parallel, torch_device.type, timeout)
        yield DistributedContext(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device, **groups)
        is_done = True
    finally:
        if not is_joined and (is_done or world_size == 1):
            dist.destroy_process_group()
            clear_sharding_caches()


def _check_sizes(
    world_size: int, replicas: int, tensor_parallel: int, expert_parallel: int, context_parallel: int
) -> None:
    """Raise ConfigError unless the ranks can be divided in this way."""
    if (tensor_parallel, expert_parallel, context_parallel).count(1) < 2:
        raise ConfigError(
            f"tensor_parallel={tensor_parallel}, expert_parallel={expert_parallel} and context_parallel="
            f"{context_parallel} do not go together yet; set one of them only."
        )
    sizes = (replicas, tensor_parallel, expert_parallel, context_parallel)
    if min(sizes) < 1 or world_size % math.prod(sizes):
        raise ConfigError(
            f"replicas={replicas}, tensor_parallel={tensor_parallel}, expert_parallel={expert_parallel} and "
            f"context_parallel={context_parallel} do not divide {world_size} ranks; give numbers of at least 1 whose "
            f"product divides the number of ranks."
        )


def _groups(
    world_size: int, replicas: int, parallel: tuple[int, int, int], device_type: str, timeout: timedelta
) -> dict[str, Any]:
    """Meshes, groups and timeout of a context; `parallel` are its numbers of tensor, expert and context ranks."""
    tensor, expert, context = parallel
    shape, expert_shape = mesh_shapes(world_size, replicas, tensor, expert)
    return {
        "mesh": _make_mesh(device_type, shape, timeout),
        "expert_mesh": None if expert_shape is None else _make_mesh(device_type, expert_shape, timeout),
        "num_context_ranks": context,
        "context_group": _adjacent_group(context, world_size, timeout) if context > 1 else None,
        "timeout_seconds": timeout.total_seconds(),
    }


def mesh_shapes(
    world_size: int, replicas: int, tensor: int, expert: int
) -> tuple[dict[str, int], dict[str, int] | None]:
    """The dimensions of `mesh` and `expert_mesh` of a context, the latter None without expert parallelism."""
    shape = {"replicate": replicas, "shard": world_size // (replicas * tensor)}
    shape |= {"tensor": tensor} if tensor > 1 else {}
    if expert == 1:
        return shape, None
    return shape, {"replicate": replicas, "shard": world_size // (replicas * expert), "expert": expert, "tensor": 1}


def _backend(device: torch.device) -> str:
    # Objects and flags are reduced on the CPU even when the model is on GPUs; clipping offloaded gradients needs both.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _init_process_group(rendezvous: str, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> None:
    backend, seconds = _backend(device), timeout.total_seconds()
    store = join_store(rendezvous, seconds) if world_size > 1 else HashStore()
    bound = device if device.type == "cuda" else None  # or NCCL would guess the device from the rank
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)


def _check_backend(device: torch.device) -> None:
    """Raise ConfigError unless the process group that exists has the backends that `device` needs."""
    backend, existing = _backend(device), dist.get_backend_config()
    if missing := [name for name in ("gloo", "nccl") if name in backend and name not in str(existing)]:
        raise ConfigError(
            f"The process group of torch.distributed has the backend {existing}, but {' and '.join(missing)} is needed "
            f"too; call init_process_group({backend!r}), or leave it to fsdp_shard.init_distributed()."
        )


def _make_mesh(device_type: str, shape: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """All ranks in row-major order as a mesh of these dimensions, whose groups have this timeout.

    `init_device_mesh` gives them the default one of their backend.
    """
    ranks = torch.arange(math.prod(shape.values())).view(*shape.values())
    groups: list[Any] = []
    for dim, size in enumerate(shape.values()):  # ranks that differ in this dimension only are a group
        rank_groups: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        is_all = len(rank_groups) == 1
        groups.append(dist.group.WORLD if is_all else _own_group(rank_groups, timeout))
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(shape))


def _adjacent_group(size: int, world_size: int, timeout: timedelta) -> Any:
    """The group of this rank among groups of `size` adjacent ranks; a collective."""
    return _own_group([list(range(first, first + size)) for first in range(0, world_size, size)], timeout)


def _own_group(rank_groups: list[list[int]], timeout: timedelta) -> Any:
    """The group of this rank, if each of `rank_groups` is one; a collective.

    Each rank makes its own group only. If all made each, a rank would split NCCL's communicator once for each of them:
    a thousand times for a dimension of size one on a thousand ranks.
    """
    own = next(group for group in rank_groups if dist.get_rank() in group)
    return dist.new_group(own, timeout=timeout, use_local_synchronization=True)


def _check_rank_is_set() -> None:
    """Raise ConfigError for one of several processes whose environment does not say which rank it is."""
    if "RANK" in os.environ:
        return
    if number_in(os.environ, "WORLD_SIZE", "1") > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but RANK is not set; start the ranks with torchrun, or unset "
            f"WORLD_SIZE for a single one."
        )
    if (num_tasks := number_in(os.environ, "SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ConfigError(
            f"srun has started {num_tasks} tasks, but RANK is not set, so that each would be the only rank; start the "
            f"program with torchrun on each machine, or set RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            f"LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT. For tasks that have nothing to do with each "
            f"other, set RANK=0."
        )


def join_store(rendezvous: str, timeout_seconds: float) -> Store:
    """Connect to the store of the ranks that the environment describes.

    Each attempt has its own prefix, so that it never sees the keys of a dead one. So has each call in a process: the
    store of torchrun outlives a run, and the same ranks may start another one. All ranks make the same calls.

    Args:
        rendezvous: Init method, such as `env://` or `file:///path`.
        timeout_seconds: How long to wait for the store.

    Returns:
        The store of this attempt.

    Raises:
        ConfigError: The environment does not say at which address the ranks meet.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if rendezvous == "env://" and missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so the ranks cannot meet; start "
            f"them with torchrun, or set both to an address and a free port of the machine of rank 0."
        )
    # A method such as file:// may bring both numbers itself; otherwise torch raises an error without them.
    rank, world_size = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
    timeout = timedelta(seconds=timeout_seconds)
    store, _, _ = next(torch_rendezvous(rendezvous, rank, world_size, timeout=timeout))
    return PrefixStore(f"fsdp-shard/attempt-{attempt()}/{next(_calls)}", store)


def attempt() -> str:
    """Return which attempt of the run this is, the same on all its ranks: 1, 2, ... under our own launcher.

    torchrun counts restarts on each machine separately, so on several machines its number is unreliable.
    """
    if ATTEMPT in os.environ:
        return os.environ[ATTEMPT]
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"


def is_restarted() -> bool:
    """Return whether the ranks of this run were started before, and failed or changed in number."""
    return int(attempt()) > (1 if ATTEMPT in os.environ else 0)


def leave_store(store: Store, num_members: int, *, serves: bool, seconds: float) -> None:
    """Announce that this member no longer uses `store`; the member that serves it waits for the others.

    A store that is already gone is no error: nobody is left to wait for.

    Args:
        store: Store that all members use.
        num_members: Number of members.
        serves: Whether this member serves the store.
        seconds: How long the serving member waits at most.
    """
    try:
        wait_for_members(store, "fsdp-shard/left", num_members if serves else 1, seconds)
    except (RuntimeError, ValueError):
        return


def wait_for_members(store: Store, key: str, num_members: int, seconds: float) -> None:
    """Count this member under `key`, and wait until `num_members` have been counted, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    num_arrived = store.add(key, 1)
    while num_arrived < num_members and time.monotonic() < deadline:
        time.sleep(0.02)
        num_arrived = store.add(key, 0)
