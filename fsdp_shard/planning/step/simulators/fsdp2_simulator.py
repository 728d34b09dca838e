"""Simulates the memory of `fully_shard`, as in `_fsdp_param_group.py` and `_fsdp_collectives.py` of torch 2.13."""

from fsdp_shard.planning.step.recording.events import END, POST_BACKWARD, Event
from fsdp_shard.planning.step.simulators.fsdp_simulator import FsdpSimulator
from fsdp_shard.planning.step.simulators.step_simulator import Key
from fsdp_shard.planning.step.snapshot import BUFFERS, GATHERED, GRADIENTS, UNREDUCED
from fsdp_shard.planning.step.unit_bytes import UnitBytes


class Fsdp2Simulator(FsdpSimulator):
    """`fully_shard`.

    Its state is that of torch's code. A key is a unit of the model or of its reference; where a set has units, they are
    FQNs of the model's. Each bullet says what is in it, from when, and until when.

    - `gathering`: keys whose gathered parameters are in the output of the all-gather; from `unshard` until `_copy_out`,
      or until the backward pass ends without using them.
    - `gathered`: keys whose gathered parameters are in use; from `_copy_out` until `free`.
    - `pending`: the unit whose all-gather output stays although it was copied; from a forward pass's `_copy_out` until
      the next one, or until the root or an evaluation ends.
    - `resharded`: keys that are kept over N ranks, with `reshard_after_forward=N`; from `post_forward` until
      `_copy_out`.
    - `stale`: keys that an evaluation left so, as it has no backward pass; from `end_evaluation` until they are
      resharded again.
    - `order`: keys as forward passes left them; from `post_forward` until the backward pass ends.
    - `buffer`: bytes of the last reduction's input; from `post_backward` until the next reduction, or until the
      backward pass ends.
    - `accumulated`: units with gradients of earlier micro-batches that are unreduced, in the dtype of the reduction;
      from `_keep_unreduced` until the `post_backward` that reduces them.
    - `undivided`: units whose unreduced gradients are whole on each tensor-parallel rank; for as long.
    - `has_sharded`: units with a reduced gradient; from `receive` on.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gathering: set[Key] = set()
        self.resharded: set[Key] = set()
        self.stale: set[Key] = set()
        self.pending: UnitBytes | None = None
        self.buffer = 0
        self.accumulated: set[str] = set()
        self.undivided: set[str] = set()
        names = [unit.fqn for unit in self.units if unit.fqn]
        self._position = {name: number for number, name in enumerate(names)}
        self._names = names

    @property
    def keeps_autograd_gradients(self) -> bool:
        return not self.rules.sync_every_micro_batch and not self.rules.casts_gradients

    def pre_forward(self, key: Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        self._copy_out(key, unit, keeps_output=not self.in_backward)
        if not self.in_backward:
            self._prefetch(key, self.rules.prefetch_forward, 1)

    def post_forward(self, key: Key, unit: UnitBytes) -> None:
        if self.in_backward:
            return
        reshard = self.rules.reshard
        if not unit.is_kept and reshard is not False and key in self.gathered:
            if type(reshard) is int:
                self.add(GATHERED, unit.gathered // reshard)
                self.note(unit.fqn)
                if key in self.stale:
                    self.stale.discard(key)
                    self.add(GATHERED, -(unit.gathered // reshard))
                self.resharded.add(key)
            self.free(key, unit)
        self.order.append(key)
        if not unit.fqn:
            self._free_pending()

    def pre_backward(self, key: Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        self._copy_out(key, unit, keeps_output=False)
        if self.rules.prefetch_backward > 0 and self._has_explicit(key):
            self._prefetch(key, self.rules.prefetch_backward, -1)
        else:
            self.unshard_one_before(key)

    def post_backward_of_call(self, unit: UnitBytes) -> None:
        self.free((False, unit.fqn), unit)

    def post_backward(self, unit: UnitBytes) -> None:
        key = (False, unit.fqn)
        if not self.is_synced:
            self.free(key, unit)
            self._keep_unreduced(unit)
            return
        if unit.fqn in self.accumulated:  # in the dtype of the reduction
            self.add(UNREDUCED, -unit.gradients)
        self.free(key, unit)
        self.add(BUFFERS, -self.buffer)
        self.buffer = 0
        if not unit.reduced_from:
            return
        self.add(BUFFERS, unit.reduced_from)
        self.note(unit.fqn, "reduce")
        if unit.fqn in self.undivided:
            self.undivided.discard(unit.fqn)
            self.add(UNREDUCED, -self._accumulated_bytes(unit.others_rows))
        held, itemsize = unit.gradients, self.rules.gradient_itemsize
        if unit.fqn in self.accumulated:
            held, itemsize = unit.reduced_from, 4
        self.accumulated.discard(unit.fqn)
        self.add(UNREDUCED, -held)
        self.add(BUFFERS, unit.reduced)
        is_divided = unit.num_shards > 1
        copies = self.rules.copies_reduced if is_divided else unit.is_scaled
        copy = unit.reduced_from if copies else 0
        self.note(unit.fqn, "reduce", {BUFFERS: copy, UNREDUCED: unit.last * itemsize if is_divided else 0})
        # The first micro-batch's is the gradient itself, unless it is cast; later ones are added to that.
        if self.rules.keeps_reduced and (self.rules.casts_reduced or unit.fqn in self.has_sharded):
            self.add(BUFFERS, unit.reduced)
        self.receive(unit)
        self.buffer = unit.reduced_from

    def note_rise(self, event: Event, rise: int) -> None:
        """Count the whole gradients of embeddings, too; this rank's rows are copied from them."""
        unit = self.by_fqn.get(event.module)
        if unit is not None and event.kind in (POST_BACKWARD, END) and self.is_synced:
            rise += unit.undivided * self.rules.gradient_itemsize
        super().note_rise(event, rise)

    def end_backward(self) -> None:
        for unit in (self.units[-1], *self.units[:-1]):
            if unit.fqn not in self.finished:
                self.post_backward(unit)
        self.order.clear()
        self.add(BUFFERS, -self.terms.get(BUFFERS, 0))
        self.buffer = 0
        for key in list(self.gathering):
            self.gathering.discard(key)
            self.add(GATHERED, -self.by_fqn[key[1]].gathered)

    def update(self) -> None:
        super().update()
        self.terms.pop(GRADIENTS, None)

    def end_evaluation(self) -> None:
        self._free_pending()
        for key in [key for key in self.gathered if not key[0]]:
            self.free(key, self.by_fqn[key[1]])
        self.stale |= {key for key in self.resharded if not key[0]}
        self.resharded -= self.stale

    def _keep_unreduced(self, unit: UnitBytes) -> None:
        if unit.others_rows and unit.fqn not in self.undivided:
            self.undivided.add(unit.fqn)
            self.add(UNREDUCED, self._accumulated_bytes(unit.others_rows))
            self.note(unit.fqn)
        if not self.rules.casts_gradients:
            return
        if unit.fqn not in self.accumulated:
            self.accumulated.add(unit.fqn)
            self.add(UNREDUCED, unit.reduced_from)
            self.note(unit.fqn)
        self.add(UNREDUCED, -unit.gradients)

    def _accumulated_bytes(self, num_elements: int) -> int:
        return num_elements * (4 if self.rules.casts_gradients else self.rules.gradient_itemsize)

    def _has_explicit(self, key: Key) -> bool:
        """Whether the settings name units to prefetch; torch's default is the unit that ran before."""
        return self.rules.prefetch_backward > 1 and self._position.get(key[1], 0) > 0

    def _prefetch(self, key: Key, number: int, direction: int) -> None:
        if key[1] not in self._position:
            return
        at = self._position[key[1]]
        positions = range(at + direction, at + direction * (number + 1), direction)
        for name in (self._names[position] for position in positions if 0 <= position < len(self._names)):
            self.unshard((key[0], name), self.by_fqn[name])

    def unshard(self, key: Key, unit: UnitBytes) -> None:
        """Gather the shards into one buffer."""
        if key in self.gathered or key in self.gathering:
            return
        self.gathering.add(key)
        if unit.num_shards == 1:
            return
        cast = unit.cast
        if key in self.resharded and cast:
            cast = unit.gathered // int(self.rules.reshard)
        self.add(GATHERED, unit.gathered)
        self.note(unit.fqn, extra={GATHERED: cast})

    def _copy_out(self, key: Key, unit: UnitBytes, *, keeps_output: bool) -> None:
        """Copy parameters out of the buffer."""
        if key not in self.gathering:
            return
        self.gathering.discard(key)
        self.gathered.add(key)
        self.add(GATHERED, unit.gathered)
        self.note(unit.fqn, extra={GATHERED: unit.largest_cast if unit.num_shards == 1 else 0})
        if keeps_output:
            self._free_pending()  # a variable in torch's `wait_for_unshard` holds it until here
        if key in self.resharded:
            self.resharded.discard(key)
            self.add(GATHERED, -(unit.gathered // int(self.rules.reshard)))
        if unit.num_shards == 1:
            return
        if keeps_output:
            self.pending = unit
        else:
            self.add(GATHERED, -unit.gathered)

    def _free_pending(self) -> None:
        if self.pending is not None:
            self.add(GATHERED, -self.pending.gathered)
            self.pending = None
