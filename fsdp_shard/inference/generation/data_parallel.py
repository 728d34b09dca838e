"""Prompts shared out over groups of ranks: who does which batches, and how the answers come together.

A group is one rank that holds the model, or several that divide its layers and do the same work.

Ranks on one machine see the same files, so weights that are read in place are in memory once. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_shard.inference.generation.types import Answer, Figures


@dataclass(frozen=True)
class Share:
    """This rank's part of the batches: every `num_groups`-th. What only rank 0 can tell is `agree`d on.

    `merge` and `total` make one of what all ranks found and measured, on rank 0; every rank has to call them. `layers`
    are the ranks of the group that divide each layer, on `device`; None where a group is one rank.
    """

    group: int = 0
    num_groups: int = 1
    local_rank: int = 0
    is_first: bool = True
    layers: DeviceMesh | None = None
    device: torch.device | None = None
    merge: Callable[[dict[int, Answer]], dict[int, Answer]] = field(default=lambda found: found)
    total: Callable[[Figures], Figures] = field(default=lambda figures: figures)
    agree: Callable[[int], int] = field(default=lambda value: value)


@contextmanager
def shared_work(num_ranks: int, device: str, timeout_seconds: float, tensor_parallel: int = 1) -> Iterator[Share]:
    """The share of this rank; with one rank all of it, and no process group is made.

    `tensor_parallel` ranks side by side are a group.
    """
    if num_ranks == 1:
        yield Share()
        return
    from fsdp_shard.distributed import distributed
    from fsdp_shard.inference.generation.types import Figures

    with distributed(device, timeout_seconds=timeout_seconds, tensor_parallel=tensor_parallel) as context:

        def merge(found: dict[int, Answer]) -> dict[int, Answer]:
            return {place: answer for part in context.gather_object(found) for place, answer in part.items()}

        def total(figures: Figures) -> Figures:
            whole = Figures()
            for part in context.gather_object(figures)[::tensor_parallel]:  # those of a group did the same
                whole.add(part)
            return whole

        yield Share(
            context.rank // tensor_parallel,
            context.world_size // tensor_parallel,
            context.local_rank,
            context.is_main,
            context.mesh["tensor"] if tensor_parallel > 1 else None,
            context.device,
            merge,
            total,
            context.broadcast_object,
        )
