"""A single rank of a run of any size, with its meshes and groups, over a backend that sends nothing.

For code such as plans that simulates that rank: collectives return at once and leave their outputs unchanged. A group
costs the same for two ranks as for thousands.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_shard.distributed import DistributedContext, SilentCommunicator, context_groups
from fsdp_shard.utils import fake_store, without_fakes

_TIMEOUT = timedelta(minutes=30)  # nothing waits


class FakeContext(SilentCommunicator, DistributedContext):
    """A rank of a run of any size, without the other ranks."""

    def all_reduce(self, values: list[float], operation: str = "sum") -> list[float]:
        return values

    def _new_mesh(self, shape: dict[str, int]) -> DeviceMesh:
        with without_fakes():  # a model may be sharded while tensors are fake
            return super()._new_mesh(shape)


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
        parallel = (tensor_parallel, expert_parallel, context_parallel)
        groups = context_groups(world_size, replicas, parallel, "cpu", _TIMEOUT)
        yield FakeContext(rank=rank, world_size=world_size, local_rank=0, device=torch.device("cpu"), **groups)
    finally:
        dist.destroy_process_group()
