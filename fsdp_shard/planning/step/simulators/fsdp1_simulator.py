"""Simulates the memory of FullyShardedDataParallel, as in `_runtime_utils.py` and `_flat_param.py` of torch 2.13."""

from collections import Counter

from fsdp_shard.planning.step.recording.events import POST_BACKWARD, PRE_BACKWARD, PRE_FORWARD, Recordings
from fsdp_shard.planning.step.simulators.fsdp_simulator import FsdpSimulator
from fsdp_shard.planning.step.simulators.step_simulator import Key
from fsdp_shard.planning.step.snapshot import BUFFERS, EVALUATION, GATHERED, GRADIENTS, UNREDUCED
from fsdp_shard.planning.step.unit_bytes import UnitBytes


class Fsdp1Simulator(FsdpSimulator):
    """FullyShardedDataParallel: a unit's parameters form one flat parameter, with one flat gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._entered: list[str] = []  # the units in forward order; empty without prefetching
        self._late: UnitBytes | None = None
        self._finishing: list[str] = []  # the units that finish, in forward order
        self._held: list[UnitBytes] = []  # those whose flat gradient is incomplete
        self._calls = Counter[str]()  # of each module in the forward pass
        self._begun = Counter[str]()  # of these, those whose backward pass has begun
        self._is_in_backward: dict[str, bool] = {}  # of the units whose backward pass has begun

    def step(self, recordings: Recordings) -> None:
        entered = (event.module for event in recordings.training if event.kind == PRE_FORWARD)
        names = [name for name in dict.fromkeys(entered) if name in self.by_fqn]
        finishing = {event.module for event in recordings.training if event.kind == POST_BACKWARD}
        self._finishing = [name for name in names if name in finishing]
        self._calls = Counter(event.module for event in recordings.training if event.kind == PRE_BACKWARD)
        if self.rules.prefetch_forward:  # torch has recorded the order in the first micro-batch of the run
            self._entered = names
        super().step(recordings)

    def pre_forward(self, key: Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        if not self.in_backward and unit.fqn in self._entered:
            after = self._entered.index(unit.fqn) + 1
            for name in self._entered[after : after + 1]:
                self.unshard((key[0], name), self.by_fqn[name])

    def post_forward(self, key: Key, unit: UnitBytes) -> None:
        if self._is_in_backward.get(unit.fqn):  # recomputed for it; other units are freed again
            return
        if not self.in_backward:
            self.order.append(key)
        if unit.num_shards == 1 or (unit.fqn and self.rules.reshard is not False):
            self.free(key, unit)

    def pre_backward(self, key: Key, unit: UnitBytes) -> None:
        if unit.fqn not in self._is_in_backward:  # only the first of its outputs that gets a gradient
            self._is_in_backward[unit.fqn] = True
            self.unshard(key, unit)
            if self.rules.prefetch_backward:
                self.unshard_one_before(key)
        if unit.gradients and self._calls[unit.fqn] > 1:
            self._begin_call(unit)

    def _begin_call(self, unit: UnitBytes) -> None:
        # Each call of a module splits its unit anew: a call's gradients exist together with the sum of those of later
        # calls, and are copied to a flat one at its end.
        if self._begun[unit.fqn]:
            self.note(unit.fqn, extra={UNREDUCED: unit.gradients})
        if self._begun[unit.fqn] == 1:
            self.add(UNREDUCED, unit.gradients)
        self._begun[unit.fqn] += 1

    def post_backward(self, unit: UnitBytes) -> None:
        # A unit is split into its parameters when it is entered. Autograd goes in reverse, and completes the flat
        # gradient after the backward pass of all that ran since: the root's is the last, even if it has only a head.
        self._held.append(unit)
        for name in reversed(self._finishing):
            complete = next((held for held in self._held if held.fqn == name), None)
            if complete is not None:
                self._held.remove(complete)
                self._complete(complete)
            if name not in self.finished:
                return

    def _complete(self, unit: UnitBytes) -> None:
        if not self.rules.prefetch_forward or not unit.fqn or not unit.gradients:
            self._finish(unit)
            return
        # A unit that was gathered ahead was split into its parameters before the unit in front of it ran. Autograd goes
        # in reverse, and completes its flat gradient only after the backward pass of the unit in front.
        self._finish_late()
        self._late = unit

    def _finish_late(self) -> None:
        if self._late is not None:
            self._finish(self._late)
        self._late = None

    def _finish(self, unit: UnitBytes) -> None:
        self._is_in_backward[unit.fqn] = False
        key = (False, unit.fqn)
        frees = self.is_synced or self.rules.reshard is not False or unit.num_shards == 1
        if not unit.gradients:
            self.free(key, unit) if frees else None
            return
        self.note(unit.fqn, extra={UNREDUCED: unit.gradients})  # copied from the parameters' gradients to a flat one
        self.add(UNREDUCED, unit.alignment)
        has_sum = self._begun.pop(unit.fqn, 0) > 1
        if has_sum:
            self.add(UNREDUCED, -unit.gradients)
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
        # A flat parameter that changes its dtype has an AccumulateGrad for each call: the last one holds its gradient
        # in addition to the sum.
        holds_call = has_sum and unit.cast > 0 and not has_two
        self.add(UNREDUCED, unit.gradients if holds_call else 0)
        self._reduce(unit)
        if has_two or holds_call:  # autograd holds the last flat gradient until the sum is reduced
            self.add(UNREDUCED, -unit.gradients)

    def _reduce(self, unit: UnitBytes) -> None:
        rules = self.rules
        cast = unit.reduced_from if rules.casts_gradients else 0
        self.add(BUFFERS, cast)
        self.note(unit.fqn, "reduce")
        if unit.num_shards == 1:
            self.note(unit.fqn, "reduce", {BUFFERS: unit.kept if rules.casts_reduced else 0})
            self.add(UNREDUCED, -unit.gradients)
            self.add(BUFFERS, unit.reduced - cast)
        else:
            self.add(BUFFERS, unit.reduced)
            self.note(unit.fqn, "reduce", {BUFFERS: unit.reduced_from if rules.copies_reduced else 0})
            self.add(BUFFERS, -cast)
            self.add(UNREDUCED, -unit.gradients)
        self.receive(unit)

    def end_backward(self) -> None:
        for unit in self._held:  # of modules that were not called
            self._complete(unit)
        self._held.clear()
        self._finish_late()
        for unit in self.units:
            if unit.fqn not in self.finished:
                self._finish(unit)
            self.free((False, unit.fqn), unit)
        self.order.clear()
        self._is_in_backward.clear()

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
