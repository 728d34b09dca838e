"""The process group, the meshes and the device of this rank.

Other rooms get a `DistributedContext` and call its collectives; only this room and `doctor` read RANK or WORLD_SIZE.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh

from fsdp_shard.distributed.communicator import Communicator
from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.distributed.hardware import init_device
from fsdp_shard.distributed.key_value_store import join_store
from fsdp_shard.distributed.launcher import world_sizes
from fsdp_shard.distributed.started_ranks import check_started, number_in
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import check, clear_sharding_caches

_SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


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

    def without_tensor_parallel(self) -> Self:
        """Return the same ranks for a model that each of them has as a whole."""
        return self if self.num_tensor_ranks == 1 else replace(self, mesh=self.mesh["replicate", "shard"])

    @property
    def seed_rank(self) -> int:
        """The index of this rank in the seed of a step: tensor-parallel ranks share one, to draw the same dropout."""
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
        ConfigError: An argument is wrong, the ranks cannot be divided as asked, or the environment does not say which
            rank this is.

    Example:
        >>> with fsdp_shard.init_distributed() as context:  # doctest: +SKIP
        ...     print(context.rank, context.world_size, context.device)
    """
    check(LaunchConfig(device=device, timeout_seconds=timeout_seconds))
    rank, world_size, local_rank = (number_in(os.environ, name, default) for name, default in _SINGLE_RANK.items())
    if is_joined := dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        _check_rank(rank, world_size)
    parallel = (tensor_parallel, expert_parallel, context_parallel)
    _check_sizes(world_size, replicas, *parallel)
    torch_device, timeout = init_device(device, local_rank), timedelta(seconds=timeout_seconds)
    if is_joined:
        _check_backend(torch_device)
    with nullcontext() if is_joined else _process_group(rendezvous, rank, world_size, timeout, torch_device):
        groups = context_groups(world_size, replicas, parallel, torch_device.type, timeout)
        yield DistributedContext(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device, **groups)


@contextmanager
def join_ranks(launch: LaunchConfig, tensor_parallel: int = 1) -> Iterator[DistributedContext | None]:
    """Yield the ranks that divide prompts or batches, and layers if `tensor_parallel` > 1; None for a single process.

    Raises:
        ConfigError: The ranks are not those of `launch`, or cannot be divided by `tensor_parallel`.

    Example:
        >>> with fs.join_ranks(config.launch, config.tensor_parallel) as context:  # doctest: +SKIP
        ...     print(context is None or context.is_main)
    """
    if max(world_sizes(launch)) == 1 and not (dist.is_initialized() and dist.get_world_size() > 1):
        check_started(launch, 1)
        yield None
        return
    with init_distributed(
        launch.device, timeout_seconds=launch.timeout_seconds, tensor_parallel=tensor_parallel
    ) as context:
        check_started(launch, context.world_size)
        yield context


def _check_sizes(
    world_size: int, replicas: int, tensor_parallel: int, expert_parallel: int, context_parallel: int
) -> None:
    """Raise ConfigError unless the ranks can be divided in this way."""
    sizes = {
        "replicas": replicas,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "context_parallel": context_parallel,
    }
    if wrong := next((name for name, size in sizes.items() if type(size) is not int), None):
        raise ConfigError(f"{wrong}={sizes[wrong]!r} is {type(sizes[wrong]).__name__}, expected an int, such as 2.")
    if (tensor_parallel, expert_parallel, context_parallel).count(1) < 2:
        raise ConfigError(
            f"tensor_parallel={tensor_parallel}, expert_parallel={expert_parallel} and context_parallel="
            f"{context_parallel} cannot be combined yet; set one of them only."
        )
    if min(sizes.values()) < 1 or world_size % math.prod(sizes.values()):
        raise ConfigError(
            f"replicas={replicas}, tensor_parallel={tensor_parallel}, expert_parallel={expert_parallel} and "
            f"context_parallel={context_parallel} do not divide {world_size} ranks; give numbers of at least 1 whose "
            f"product divides the number of ranks."
        )


def context_groups(
    world_size: int, replicas: int, parallel: tuple[int, int, int], device_type: str, timeout: timedelta
) -> dict[str, Any]:
    """Meshes, groups and timeout of a context; a collective.

    Args:
        world_size: Number of ranks in the process group.
        replicas: Number of copies of the model.
        parallel: Numbers of tensor, expert and context ranks.
        device_type: Type of the ranks' devices.
        timeout: Timeout of the groups.

    Returns:
        Arguments of `DistributedContext`.
    """
    tensor, expert, context = parallel
    shape, expert_shape = _mesh_shapes(world_size, replicas, tensor, expert)
    return {
        "mesh": _make_mesh(device_type, shape, timeout),
        "expert_mesh": None if expert_shape is None else _make_mesh(device_type, expert_shape, timeout),
        "num_context_ranks": context,
        "context_group": _adjacent_group(context, world_size, timeout) if context > 1 else None,
        "timeout_seconds": timeout.total_seconds(),
    }


def _mesh_shapes(
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


@contextmanager
def _process_group(
    rendezvous: str, rank: int, world_size: int, timeout: timedelta, device: torch.device
) -> Iterator[None]:
    """Initialize the process group; at the end destroy it, unless this rank fails among others."""
    backend, seconds = _backend(device), timeout.total_seconds()
    store = join_store(rendezvous, seconds) if world_size > 1 else HashStore()
    bound = device if device.type == "cuda" else None  # or NCCL would guess the device from the rank
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    hook_of_group = sys.excepthook
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if is_done or world_size == 1:
            dist.destroy_process_group()
            if sys.excepthook is hook_of_group:  # torch leaves it, which writes `[rank0]` before each line
                sys.excepthook = hook
            clear_sharding_caches()


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


def _check_rank(rank: int, world_size: int) -> None:
    """Raise ConfigError if the environment does not say which of several ranks this is, or names one beyond them."""
    if rank >= world_size:
        raise ConfigError(
            f"RANK={rank} is not one of WORLD_SIZE={world_size} ranks, which are numbered from 0; correct one of "
            f"them, or start the ranks with torchrun."
        )
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
