"""Collectives on Python objects and small lists of numbers, over all ranks or in a process that is the only one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.distributed.started_ranks import number_in
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import check


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


class SilentCommunicator(Communicator):
    """A rank that waits for no others: collectives return its own values, those of tensors by torch's fake backend."""

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
class OnlyRank(SilentCommunicator):
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
    """`current_ranks`, whose group is destroyed when the block ends; a collective. ConfigError for a wrong timeout."""
    check(LaunchConfig(timeout_seconds=timeout_seconds))
    ranks = current_ranks(timeout_seconds)
    try:
        yield ranks
    finally:
        ranks.destroy_group()
