"""Prompts shared out over ranks that each hold the model: who does which batches, and how the answers come together.

Ranks on one machine see the same files, so weights that are read in place are in memory once. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_shard.inference.decode import Answer, Figures


@dataclass(frozen=True)
class Share:
    """This rank's part of the batches: every `world_size`-th. What only rank 0 can tell is `agree`d on.

    `merge` and `total` make one of what all ranks found and measured, on rank 0; every rank has to call them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    merge: Callable[[dict[int, Answer]], dict[int, Answer]] = field(default=lambda found: found)
    total: Callable[[Figures], Figures] = field(default=lambda figures: figures)
    agree: Callable[[int], int] = field(default=lambda value: value)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def shared_work(num_ranks: int, device: str, timeout_seconds: float) -> Iterator[Share]:
    """The share of this rank; with one rank all of it, and no process group is made."""
    if num_ranks == 1:
        yield Share()
        return
    from fsdp_shard.distributed import distributed
    from fsdp_shard.inference.decode import Figures

    with distributed(device, timeout_seconds=timeout_seconds) as context:

        def merge(found: dict[int, Answer]) -> dict[int, Answer]:
            return {place: answer for part in context.gather_object(found) for place, answer in part.items()}

        def total(figures: Figures) -> Figures:
            whole = Figures()
            for part in context.gather_object(figures):
                whole.add(part)
            return whole

        yield Share(context.rank, context.world_size, context.local_rank, merge, total, context.broadcast_object)
