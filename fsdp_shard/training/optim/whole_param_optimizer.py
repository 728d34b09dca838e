"""Optimizers whose updates need full parameters, for sharded parameters: each is updated by the rank that owns it.

A step works in rounds of one parameter per owner, all of one dtype. The owner gathers the shards of its gradient and
its values, updates them as in a single process, and scatters the values back. Updates are therefore bit-equal to those
of one process under any wrapper and number of ranks, and a rank holds at most one full parameter and its gradient. The
state stays with the owner.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_shard.checkpoint import plain_tensors
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.optim.group_watch import GroupWatch
from fsdp_shard.utils import balanced_partition

# What a rank reports of its parameter groups. In the traced steps of `plan`, every number that is read is 1.
_UNCHANGED, _CHANGED = 1, 2

Build = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


class FullParamOptimizer(torch.optim.Optimizer):
    """Runs the optimizer that `build` creates, on the trainable `shards`, sharded over the ranks of `group`.

    `lengths` are the numbers of elements of each parameter on each rank; None gathers them.

    Attributes:
        inner: The optimizer of this rank's own parameters, by full parameter.
    """

    def __init__(
        self,
        shards: Mapping[str, LocalShard],
        group: dist.ProcessGroup,
        build: Build,
        lengths: Mapping[str, list[int]] | None,
    ) -> None:
        self._shards = {name: shard for name, shard in shards.items() if shard.tensor.requires_grad}
        self._group, self._rank = group, dist.get_rank(group)
        sizes = {name: torch.Size(shard.shape).numel() for name, shard in self._shards.items()}
        self._owned = balanced_partition(sorted(sizes), dist.get_world_size(group), sizes.__getitem__)
        self._lengths = _lengths(self._shards, group) if lengths is None else lengths
        self._sent = {name: _without_copies(self._lengths[name], sizes[name]) for name in self._shards}
        # The parameters of the inner optimizer, which use memory only during their update.
        self._full = {name: nn.Parameter(_without_memory(shard)) for name, shard in self._shards.items()}
        self.inner = build(self._full)
        self._watch = GroupWatch(self.inner)
        names = {id(param): name for name, param in self._full.items()}
        groups = [
            {"lr": float(group["lr"]), "params": [self._shards[names[id(param)]].tensor for param in group["params"]]}
            for group in self.inner.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        """Update all parameters that have a gradient on any rank; a collective.

        Raises:
            ConfigError: On all ranks: the last step changed the options of a parameter group.
        """
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if isinstance(inner["lr"], torch.Tensor):
                inner["lr"].fill_(outer["lr"])
            else:
                inner["lr"] = outer["lr"]
        trained = self._with_gradients()
        owned = [[name for name in names if name in trained] for names in self._owned]
        for names in update_rounds(owned, {name: shard.data.dtype for name, shard in self._shards.items()}):
            self._update(names)

    def state_shards(self) -> dict[str, LocalShard]:
        """The optimizer state for a checkpoint: tensors `PARAMETER.SLOT`, unsharded on the rank that owns them."""
        found = {}
        for name in self._owned[self._rank]:
            for slot, value in sorted(self.inner.state.get(self._full[name], {}).items()):
                for part, tensor in plain_tensors(slot, value):
                    shape, writes = tuple(tensor.shape), self._shards[name].writes
                    found[f"{name}.{part}"] = LocalShard(tensor, tensor.view(-1), 0, shape, writes)
        return found

    def state_values(self) -> dict[str, Any]:
        """The entries of the state that are no tensors, as `PARAMETER.SLOT`, on the rank that owns them."""
        return {
            f"{name}.{slot}": value
            for name in self._owned[self._rank]
            for slot, value in sorted(self.inner.state.get(self._full[name], {}).items())
            if not isinstance(value, torch.Tensor)
        }

    def _with_gradients(self) -> set[str]:
        """Names of the parameters with a gradient on any rank; under FSDP1, a rank may have none of its elements."""
        names = list(self._shards)
        state = _UNCHANGED if self._watch.changed is None else _CHANGED
        flags = [state, *(self._shards[name].tensor.grad is not None for name in names)]
        has = torch.tensor(flags, dtype=torch.int32).to(next(iter(self._shards.values())).data.device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        state, *are_trained = has.tolist()
        if state == _CHANGED:
            raise ConfigError(
                f"{type(self.inner).__name__} changes its parameter groups in step() "
                f"({self._watch.changed or 'on another rank'}), which with needs_full_params is called once for each "
                f"parameter, so that updates would depend on the number of ranks; keep counts in the state of each "
                f"parameter."
            )
        return {name for name, flag in zip(names, are_trained, strict=True) if flag}

    def _update(self, names: Sequence[str | None]) -> None:
        """Update `names[rank]` on each rank; None for a rank with nothing left to update."""
        owned = names[self._rank]
        shards = [self._shards[name] for name in names if name is not None]
        none = [0] * len(names)
        sent = [0 if name is None else self._sent[name][self._rank] for name in names]
        received = none if owned is None else self._sent[owned]
        parts = list(zip(shards, (sent[rank] for rank, name in enumerate(names) if name is not None), strict=True))
        values = self._exchange([shard.data[:count] for shard, count in parts], received, sent)
        gradients = self._exchange([_gradient(shard)[:count] for shard, count in parts], received, sent)
        if owned is not None:
            param, shape = self._full[owned], self._shards[owned].shape
            param.data, param.grad = values.view(shape), gradients.view(shape)
            self.inner.step()
            values, param.grad = param.data.view(-1), None
            param.data = _without_memory(self._shards[owned])
            values = values.repeat(sum(self._lengths[owned]) // len(values))  # for each rank that has a copy
        held = [0 if name is None else len(self._shards[name].data) for name in names]
        updated = self._exchange([values], held, none if owned is None else self._lengths[owned])
        for shard, elements in zip(shards, updated.split([len(shard.data) for shard in shards]), strict=True):
            shard.data.copy_(elements)

    def _exchange(self, sent: list[torch.Tensor], received: list[int], lengths: list[int]) -> torch.Tensor:
        """All-to-all of flat tensors: send `lengths[rank]` elements to each rank, receive `received[rank]` of each."""
        flat = torch.cat(sent)
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, lengths, group=self._group)
        return result


def update_rounds(
    owned: Sequence[Sequence[str]], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str | None, ...]]:
    """Yield the parameters that are updated at the same time, one or None for each of their owners.

    They have one dtype, as what they exchange is joined, which would be promoted.
    """
    for dtype in dict.fromkeys(dtypes.values()):
        yield from itertools.zip_longest(*([name for name in names if dtypes[name] == dtype] for names in owned))


def _lengths(shards: Mapping[str, LocalShard], group: dist.ProcessGroup) -> dict[str, list[int]]:
    """Number of elements of each parameter on each rank: consecutive ranges, or copies of a scalar; a collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: (shard.start, len(shard.data)) for name, shard in shards.items()}, group)
    for name, shard in shards.items():
        end = 0
        for start, length in (ranges[name] for ranges in everyone):
            assert not length or start == end or not shard.shape, f"the shards of {name} are not consecutive"
            end = start + length if length else end
        assert end == torch.Size(shard.shape).numel(), f"the ranks do not hold all of {name}"
    return {name: [ranges[name][1] for ranges in everyone] for name in shards}


def _without_copies(lengths: list[int], size: int) -> list[int]:
    """How many of its `lengths` elements each rank sends for a parameter of `size` elements; one copy is enough."""
    return lengths if sum(lengths) == size else [size, *([0] * (len(lengths) - 1))]


def _without_memory(shard: LocalShard) -> torch.Tensor:
    """A tensor of the unsharded shape that occupies the memory of one element."""
    return shard.data.new_zeros(()).expand(shard.shape)


def _gradient(shard: LocalShard) -> torch.Tensor:
    gradient = shard.tensor.grad
    if gradient is None:
        assert not len(shard.data), "a gradient exists on some ranks only"
        return shard.data[:0]
    return shard.view_of(gradient)
