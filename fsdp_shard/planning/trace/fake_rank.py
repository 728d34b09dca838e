"""A single rank of a run of any size, with its meshes and groups, over a backend that sends nothing.

For code such as plans that simulates that rank: collectives return at once and leave their outputs unchanged. A group
costs the same for two ranks as for thousands.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_shard.distributed import DistributedContext, SilentCommunicator, mesh_shapes
from fsdp_shard.utils import fake_store, without_fakes


class FakeContext(SilentCommunicator, DistributedContext):
    """A rank of a run of any size, without the other ranks."""

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        return values

    def _new_mesh(self, shape: dict[str, int]) -> DeviceMesh:
        with without_fakes():  # a model may be sharded while tensors are fake
            return _mesh(shape, self.rank)


@contextmanager
def as_fake_rank(
    rank: int,
    world_size: int,
    replicas: int = 1,
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
) -> Iterator[FakeContext]:
    """Act as one of `world_size` ranks within the block, on the CPU; this process must not be in a process group.

    Args:
        rank: The rank.
        world_size: Number of ranks, a multiple of the product of the following arguments.
        replicas: As in `init_distributed`, like the following arguments.
        tensor_parallel: Number of adjacent ranks that divide each layer.
        expert_parallel: Number of adjacent ranks that divide the experts of a mixture.
        context_parallel: Number of adjacent ranks that divide each sequence.

    Yields:
        The rank and its meshes, which equal those of `init_distributed`.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        shape, expert_shape = mesh_shapes(world_size, replicas, tensor_parallel, expert_parallel)
        first = rank - rank % context_parallel
        neighbors = _group(list(range(first, first + context_parallel))) if context_parallel > 1 else None
        yield FakeContext(
            rank=rank,
            world_size=world_size,
            local_rank=0,
            device=torch.device("cpu"),
            mesh=_mesh(shape, rank),
            expert_mesh=None if expert_shape is None else _mesh(expert_shape, rank),
            num_context_ranks=context_parallel,
            context_group=neighbors,
        )
    finally:
        dist.destroy_process_group()


def _mesh(shape: dict[str, int], rank: int) -> DeviceMesh:
    """Create a mesh of all ranks in row-major order, with only the groups of `rank`."""
    ranks = torch.arange(prod(shape.values())).view(*shape.values())
    place = [int(index) for index in (ranks == rank).nonzero()[0]]
    lines = [ranks[tuple(slice(None) if i == dim else at for i, at in enumerate(place))] for dim in range(len(place))]
    groups: list[Any] = [_group(line.tolist()) for line in lines]
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=tuple(shape))


def _group(members: list[int]) -> Any:
    return dist.group.WORLD if len(members) == dist.get_world_size() else dist.new_group(members, backend="fake")
