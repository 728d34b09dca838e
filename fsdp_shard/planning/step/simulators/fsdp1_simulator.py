"""Simulates the memory of FullyShardedDataParallel, as in `_runtime_utils.py` and `_flat_param.py` of torch 2.13."""

from fsdp_shard.planning.step.simulators.fsdp_simulator import FsdpSimulator
from fsdp_shard.planning.step.simulators.step_simulator import Key
from fsdp_shard.planning.step.snapshot import BUFFERS, EVALUATION, GATHERED, GRADIENTS, UNREDUCED
from fsdp_shard.planning.step.unit_bytes import UnitBytes


class Fsdp1Simulator(FsdpSimulator):
    """FullyShardedDataParallel: a unit's parameters form one flat parameter, with one flat gradient."""

    def enter(self, key: Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        if self.in_backward:
            return
        if self.rules.prefetch_forward:
            names = [*self.entered]
            at = names.index(unit.fqn) if unit.fqn in names else len(names)
            for name in names[at + 1 : at + 2]:
                self.unshard((key[0], name), self.by_fqn[name])
        if self.micro_batch == 0:
            self.entered.setdefault(unit.fqn)

    def leave(self, key: Key, unit: UnitBytes) -> None:
        if self.in_backward:
            return
        self.order.append(key)
        if unit.num_shards == 1 or (unit.fqn and self.rules.reshard is not False):
            self.free(key, unit)

    def begin(self, key: Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        if self.rules.prefetch_backward:
            self.unshard_one_before(key)

    def finish(self, unit: UnitBytes) -> None:
        key = (False, unit.fqn)
        frees = self.is_synced or self.rules.reshard is not False or unit.num_shards == 1
        if not unit.gradients:
            self.free(key, unit) if frees else None
            return
        self.note(unit.fqn, extra={UNREDUCED: unit.gradients})  # copied from the parameters' gradients to a flat one
        if frees:
            self.free(key, unit)
        if not self.is_synced:
            if unit.fqn in self.has_sharded:  # the flat gradient of an earlier micro-batch
                self.add(UNREDUCED, -unit.gradients)
            self.has_sharded.add(unit.fqn)
            return
        has_two = not self.rules.sync_every_micro_batch and unit.fqn in self.has_sharded
        if has_two:
            self.has_sharded.discard(unit.fqn)
        self._reduce(unit)
        if has_two:  # autograd holds this micro-batch's flat gradient until the reduction of the sum starts
            self.add(UNREDUCED, -unit.gradients)

    def _reduce(self, unit: UnitBytes) -> None:
        rules = self.rules
        cast = unit.reduced_from if rules.casts_gradients else 0
        self.add(BUFFERS, cast)
        self.note(unit.fqn, "reduce")
        if unit.num_shards == 1:
            self.add(UNREDUCED, -unit.gradients)
            self.add(BUFFERS, unit.reduced - cast)
        else:
            self.add(BUFFERS, unit.reduced)
            self.note(unit.fqn, "reduce", {BUFFERS: unit.reduced_from if rules.copies_reduced else 0})
            self.add(BUFFERS, -cast)
            self.add(UNREDUCED, -unit.gradients)
        self.receive(unit)

    def end_backward(self) -> None:
        for unit in self.units:
            if unit.fqn not in self.finished:
                self.finish(unit)
            self.free((False, unit.fqn), unit)
        self.order.clear()

    def update(self) -> None:
        super().update()
        for phase in ("save", EVALUATION):
            self.note("", phase)  # a flat parameter keeps its gradient until the next forward pass
        self.terms.pop(GRADIENTS, None)

    def unshard(self, key: Key, unit: UnitBytes) -> None:
        if key in self.gathered or not unit.gathered:
            return
        self.gathered.add(key)
        self.add(GATHERED, unit.gathered)
        self.note(unit.fqn, extra={GATHERED: unit.cast if unit.num_shards > 1 else 0})
