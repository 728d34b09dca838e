"""The common part of the FSDP1 and FSDP2 simulators: units are all-gathered and freed, gradients reduce-scattered."""

from fsdp_shard.planning.step.simulators.step_simulator import Key, StepSimulator
from fsdp_shard.planning.step.snapshot import BUFFERS, GATHERED, GRADIENTS
from fsdp_shard.planning.step.unit_bytes import UnitBytes


class FsdpSimulator(StepSimulator):
    """The behavior that FSDP1 and FSDP2 share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gathered: set[Key] = set()
        self.order: list[Key] = []  # in which modules were left, for prefetching
        self.has_sharded: set[str] = set()  # units with a gradient of an earlier micro-batch

    def unshard(self, key: Key, unit: UnitBytes) -> None:
        """Gather the parameters of a unit."""
        raise NotImplementedError

    def unshard_one_before(self, key: Key) -> None:
        """Gather the unit left just before this one, whose backward pass comes next."""
        if key in self.order:
            position = len(self.order) - 1 - self.order[::-1].index(key)
            if position > 0:
                before = self.order[position - 1]
                self.unshard(before, self.by_fqn[before[1]])

    def free(self, key: Key, unit: UnitBytes) -> None:
        """Free the gathered parameters."""
        if key in self.gathered:
            self.gathered.discard(key)
            self.add(GATHERED, -unit.gathered)

    def receive(self, unit: UnitBytes) -> None:
        """Store this rank's part of the reduced gradients, now in the buffers, as the gradient, or add it to that."""
        rules = self.rules
        if rules.casts_reduced:
            self.note(unit.fqn, "reduce", {BUFFERS: unit.kept})
        elif unit.fqn in self.has_sharded:
            self.note(unit.fqn, "reduce")
        self.add(BUFFERS, -unit.reduced)
        if not rules.has_host_gradients and unit.fqn not in self.has_sharded:
            self.add(GRADIENTS, unit.kept)
        self.has_sharded.add(unit.fqn)
