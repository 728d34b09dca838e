"""Optimizers that need whole parameters, over sharded ones: each parameter has a rank that owns its update.

A step goes in rounds, one parameter of each owner a round: its gradient and its values come together on the owner, the
real optimizer updates them as it would in a single process, and the values go back to where they lie. So the updates
are those of one process, bit for bit, under any wrapper and number of ranks, and no rank ever has more whole than one
parameter and its gradient. The state stays with the owner. Knows a parameter by its `LocalShard` only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_shard.distributed import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

Build = Callable[[dict[str, nn.Parameter]], "Optimizer"]


def assign_owners(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The names that each rank owns, largest first, so that all own about as much; the same on every rank."""
    owned: list[list[str]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = totals.index(min(totals))
        owned[rank].append(name)
        totals[rank] += sizes[name]
    return owned


class WholeOptimizer(torch.optim.Optimizer):
    """`build`'s optimizer over the trainable ones of `shards`, which are divided over the ranks of `group`."""

    def __init__(self, shards: Mapping[str, LocalShard], group: ProcessGroup, build: Build) -> None:
        self._shards = {name: shard for name, shard in shards.items() if shard.tensor.requires_grad}
        self._group, self._rank = group, dist.get_rank(group)
        sizes = {name: torch.Size(shard.shape).numel() for name, shard in self._shards.items()}
        self._owned = assign_owners(sizes, dist.get_world_size(group))
        self._lengths = _lengths(self._shards, group)
        # The real optimizer's own parameters: they have memory while they are updated.
        self._stand_ins = {name: _stand_in(shard) for name, shard in self._shards.items()}
        self._real = build(self._stand_ins)
        names = {id(param): name for name, param in self._stand_ins.items()}
        groups = [
            {"lr": float(group["lr"]), "params": [self._shards[names[id(param)]].tensor for param in group["params"]]}
            for group in self._real.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no closure
        """Update all parameters that have a gradient on any rank; a collective."""
        for mine, theirs in zip(self.param_groups, self._real.param_groups, strict=True):
            _set_rate(theirs, float(mine["lr"]))
        trained = self._with_gradients()
        owned = [[name for name in names if name in trained] for names in self._owned]
        for names in itertools.zip_longest(*owned):
            self._update(names)

    def state_shards(self) -> dict[str, LocalShard]:
        """What a checkpoint keeps: the tensors of each state, as `PARAMETER.SLOT`, whole on the rank that owns them."""
        found = {}
        for name in self._owned[self._rank]:
            for slot, value in sorted(self._real.state.get(self._stand_ins[name], {}).items()):
                for part, tensor in _plain_tensors(slot, value):
                    shape = tuple(tensor.shape)
                    writes = self._shards[name].writes
                    found[f"{name}.{part}"] = LocalShard(tensor, tensor.view(-1), 0, shape, writes)
        return found

    def _with_gradients(self) -> set[str]:
        """Names of the parameters that have a gradient; FSDP1 gives none to a rank that holds nothing of it."""
        names = list(self._shards)
        has = torch.tensor([self._shards[name].tensor.grad is not None for name in names], dtype=torch.int32)
        device = next(iter(self._shards.values())).data.device
        has = has.to(device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        return {name for name, flag in zip(names, has.tolist(), strict=True) if flag}

    def _update(self, names: Sequence[str | None]) -> None:
        """Update `names[rank]` on each rank; None where a rank has nothing left to do."""
        mine = names[self._rank]
        values = self._to_owners(names, lambda shard: shard.data)
        gradients = self._to_owners(names, _gradient)
        if mine is not None:
            stand_in, shape = self._stand_ins[mine], self._shards[mine].shape
            stand_in.data, stand_in.grad = values.view(shape), gradients.view(shape)
            self._real.step()
            stand_in.grad = None
            values = stand_in.data.view(-1)
            stand_in.data = _no_memory(self._shards[mine])
        self._from_owners(names, values)

    def _to_owners(self, names: Sequence[str | None], part: Callable[[LocalShard], torch.Tensor]) -> torch.Tensor:
        """This rank's own one of `names`, whole and flat; every rank sends its part of each to the owner."""
        parts = [part(self._shards[name]) for name in names if name is not None]
        mine = names[self._rank]
        lengths = self._lengths[mine] if mine is not None else [0] * len(names)
        sent = torch.cat(parts)
        whole = sent.new_empty(sum(lengths))
        dist.all_to_all_single(whole, sent, lengths, self._here(names), group=self._group)
        return whole

    def _from_owners(self, names: Sequence[str | None], whole: torch.Tensor) -> None:
        """Every owner sends each rank its part of what it has whole, which is put where it lies."""
        mine, here = names[self._rank], self._here(names)
        lengths = self._lengths[mine] if mine is not None else [0] * len(names)
        received = whole.new_empty(sum(here))
        dist.all_to_all_single(received, whole, here, lengths, group=self._group)
        for name, values in zip(names, received.split(here), strict=True):
            if name is not None:
                self._shards[name].data.copy_(values)

    def _here(self, names: Sequence[str | None]) -> list[int]:
        """How many elements of each of `names` this rank holds."""
        return [0 if name is None else len(self._shards[name].data) for name in names]


def _lengths(shards: Mapping[str, LocalShard], group: ProcessGroup) -> dict[str, list[int]]:
    """For each parameter, how many elements each rank holds; a collective. Their ranges follow on each other."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: (shard.start, len(shard.data)) for name, shard in shards.items()}, group)
    for name, shard in shards.items():
        at = 0
        for start, length in (ranges[name] for ranges in everyone):
            assert not length or start == at, f"the parts of {name} do not follow on each other"
            at += length
        assert at == torch.Size(shard.shape).numel(), f"the ranks do not hold all of {name}"
    return {name: [ranges[name][1] for ranges in everyone] for name in shards}


def _stand_in(shard: LocalShard) -> nn.Parameter:
    return nn.Parameter(_no_memory(shard))


def _no_memory(shard: LocalShard) -> torch.Tensor:
    """A tensor of the whole shape that takes the memory of one element."""
    return shard.data.new_zeros(()).expand(shard.shape)


def _gradient(shard: LocalShard) -> torch.Tensor:
    gradient = shard.tensor.grad
    if gradient is None:
        assert not len(shard.data), "a gradient is there on some ranks only"
        return shard.data[:0]
    return shard.view_of(gradient)


def _plain_tensors(slot: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """A state as plain tensors: itself, or the parts of a quantized one that change."""
    if not isinstance(value, torch.Tensor):
        return []
    if not hasattr(value, "__tensor_flatten__"):
        return [(slot, value)]
    parts, _ = value.__tensor_flatten__()
    return [(f"{slot}.{part}", getattr(value, part)) for part in parts if part != "qmap"]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
