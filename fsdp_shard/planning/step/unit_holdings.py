"""A rank's part of each unit for the whole run, and how evenly the units are sharded.

It is computed on demand: a plan of thousands of ranks needs it for one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fsdp_shard.planning.step.optimizer import step_bytes
from fsdp_shard.sharding import Shape, Unit
from fsdp_shard.training import OptimConfig


@dataclass(frozen=True, slots=True)
class UnitHolding:
    """A rank's part of a unit: bytes by term; `fqn` is "" for the root."""

    fqn: str
    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class UnevenUnit:
    """A unit whose shards differ: the bytes of its parameters on the fullest shard, and the mean."""

    fqn: str
    most_bytes: int
    mean_bytes: float

    @property
    def ratio(self) -> float:
        """The fullest shard divided by the mean; 1.0 is perfectly even."""
        return self.most_bytes / self.mean_bytes


@dataclass(frozen=True)
class UnitShards:
    """The shards of a replica, by unit.

    Attributes:
        units: The units, the root last.
        local_shapes: The local shape of every parameter for each shard; equal shards may share a dict.
        shapes: The unsharded shapes.
        dtypes: The dtype of every parameter.
        padding_dtype: The dtype of the padding.
        with_gradient: Names of the parameters with a gradient.
        trained: Names of the trained parameters.
        updated: Names of those that a run on text uses: they get gradients, and optimizer state.
        owned: Names of the whole parameters that each shard's rank updates; None if each updates its own part.
        optim: The optimizer.
        flattens_units: Whether a unit is one flat parameter.
        has_average: Whether the trained weights have an average.
    """

    units: Sequence[Unit]
    local_shapes: Sequence[Mapping[str, Shape]]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    padding_dtype: torch.dtype
    with_gradient: frozenset[str]
    trained: frozenset[str]
    updated: frozenset[str]
    owned: Sequence[Sequence[str]] | None
    optim: OptimConfig
    flattens_units: bool
    has_average: bool

    def parts_with_state(self, local: Mapping[str, Shape]) -> dict[str, Shape]:
        """The parts among `local` that have optimizer state if each rank updates its own: under FSDP1, no empty one."""
        updated = {name: shape for name, shape in local.items() if name in self.updated}
        return {name: shape for name, shape in updated.items() if prod(shape) or not self.flattens_units}

    def num_bytes(self, local: Mapping[str, Shape]) -> int:
        """Bytes of parts of parameters, and of padding, by name."""
        return sum(self._num_bytes(name, local) for name in local)

    def held(self, shard: int) -> tuple[UnitHolding, ...]:
        """What a rank with this shard holds of each unit, in unit order; empty units are skipped."""
        local = self.local_shapes[shard]
        known: dict[object, int] = {}
        found = []
        for number, unit in enumerate(self.units):
            names = self._names(number, unit, local)
            own = {name: local[name] for name in names if name in self.trained}
            terms = {
                "parameters": sum(self._num_bytes(name, local) for name in names),
                "gradients": sum(self._num_bytes(name, local) for name in names if name in self.with_gradient),
                "optimizer": self._optimizer(shard, unit, own, known),
                "average": 4 * sum(map(prod, own.values())) if self.has_average else 0,
            }
            holding = UnitHolding(unit.fqn, {term: num for term, num in terms.items() if num})
            found += [holding] if holding.terms else []
        return tuple(found)

    def uneven(self) -> tuple[UnevenUnit, ...]:
        """The units whose shards differ, the one with the most bytes above the mean first."""
        contents = {id(local): local for local in self.local_shapes}
        numbers = [id(local) for local in self.local_shapes]
        found = []
        for number, unit in enumerate(self.units):
            sizes = {
                key: sum(self._num_bytes(name, local) for name in self._names(number, unit, local))
                for key, local in contents.items()
            }
            if len(set(sizes.values())) > 1:
                mean = sum(sizes[key] for key in numbers) / len(numbers)
                found.append(UnevenUnit(unit.fqn, max(sizes.values()), mean))
        return tuple(sorted(found, key=lambda unit: unit.mean_bytes - unit.most_bytes))

    def _names(self, number: int, unit: Unit, local: Mapping[str, Shape]) -> list[str]:
        return [name for name in (*unit.parameters, f"(padding of unit {number})") if name in local]

    def _num_bytes(self, name: str, local: Mapping[str, Shape]) -> int:
        return prod(local[name]) * self.dtypes.get(name, self.padding_dtype).itemsize

    def _optimizer(self, shard: int, unit: Unit, own: Mapping[str, Shape], known: dict[object, int]) -> int:
        """Bytes of the optimizer state; identical layers are computed once."""
        if self.owned is not None:
            owned = {*self.owned[shard]} & {*unit.parameters}
            updated: Mapping[str, Shape] = {name: self.shapes[name] for name in unit.parameters if name in owned}
        else:
            updated = self.parts_with_state(own)
        if not updated:
            return 0
        key = tuple((name.removeprefix(unit.fqn), shape, self.dtypes[name]) for name, shape in updated.items())
        if key not in known:
            known[key], _ = step_bytes(self.optim, updated, self.shapes, self.dtypes)
        return known[key]
