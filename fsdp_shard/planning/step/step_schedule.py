"""Plays a training step of one rank over the units of its model: what is in memory at each moment, term by term.

Pure Python: `block_profiles` has measured what activations and gradients of the unsharded model take, and here the
wrapper's own memory is added as torch's code handles it (torch 2.13: `_fsdp_param_group.py` and
`_fsdp_collectives.py` of `fully_shard`, `_runtime_utils.py` and `_flat_param.py` of FullyShardedDataParallel,
`reducer.cpp` of DDP).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_shard.planning.step.block_profiles import BEGIN, END, ENTER, FINISH, LEAVE, LOSS, Event, Tapes

GATHERED, UNREDUCED, BUFFERS, GRADIENTS = "gathered", "unreduced gradients", "reduce buffers", "gradients"
ACTIVATIONS, LOSS_TERM, TEMPORARIES = "activations", "loss", "optimizer temporaries"
EVALUATION, BUFFERS_OF_SAVE = "evaluation", "save buffers"
_SHOWN = 3  # micro-batches; the third is as the fourth


@dataclass(frozen=True, slots=True)
class Moment:
    """What is in memory at one moment of a run.

    Attributes:
        phase: load, resume, forward, loss, backward, reduce, optimizer, save or evaluation.
        where: FQN of the unit or block, "" for the root.
        terms: Bytes by term, such as parameters, gathered, gradients, unreduced gradients, optimizer, activations.
    """

    phase: str
    where: str
    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit on one rank, with the padding that makes shards even.

    Attributes:
        fqn: FQN of the module; "" for the root.
        num_shards: Number of ranks that it is gathered from.
        cast: The shard in the dtype that the unit computes in; 0 where it is stored in that.
        largest_cast: The same of its largest parameter.
        gathered: The parameters gathered, in the dtype that the unit computes in.
        gradients: The unsharded gradients as the backward pass leaves them.
        reduced_from: What is reduced: the unsharded gradients in the dtype of the reduction.
        reduced: This rank's part of that.
        kept: This rank's part in the dtype of the parameters.
        last: Elements of its last trained parameter, whose unsharded gradient a loop of torch's holds a little longer.
        is_kept: Whether it stays gathered after the forward pass whatever the settings say.
        is_scaled: Whether its gradient is divided by another number than that of its ranks.
    """

    fqn: str
    num_shards: int
    cast: int
    largest_cast: int
    gathered: int
    gradients: int
    reduced_from: int
    reduced: int
    kept: int
    last: int = 0
    is_kept: bool = False
    is_scaled: bool = False


@dataclass(frozen=True)
class StepRules:
    """How a step goes.

    Attributes:
        reshard: As in `shard.reshard_after_forward`.
        prefetch_forward: Number of units that are gathered ahead in the forward pass.
        prefetch_backward: The same in the backward pass.
        num_micro_batches: Number of micro-batches.
        sync_every_micro_batch: Whether gradients are reduced after each of them.
        gradient_itemsize: Bytes of an element of a gradient as the backward pass leaves it.
        casts_gradients: Whether gradients are reduced in another dtype than they are computed in.
        casts_reduced: Whether they are reduced in another dtype than parameters have.
        keeps_reduced: Whether what was reduced stays until the end of the backward pass too (replicas).
        copies_reduced: Whether the collective makes a copy of what it reduces (gloo).
        offloads_activations: Whether what blocks save is in CPU memory until it is used.
        has_host_gradients: Whether reduced gradients are in CPU memory.
        save_bytes: What a save takes for a moment.
    """

    reshard: bool | int = True
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    num_micro_batches: int = 1
    sync_every_micro_batch: bool = True
    gradient_itemsize: int = 2
    casts_gradients: bool = False
    casts_reduced: bool = False
    keeps_reduced: bool = False
    copies_reduced: bool = False
    offloads_activations: bool = False
    has_host_gradients: bool = False
    save_bytes: int = 0


_Key = tuple[bool, str]  # whether it is of the reference, and the FQN


@dataclass
class Player:
    """Plays the tape of a micro-batch; a subclass is a wrapper.

    Attributes:
        units: The units, the root last.
        rules: How the step goes.
        terms: Bytes that are in use now, by term; those of the state from the beginning.
        moments: What was in use until now.
        most_offloaded: The most bytes of activations that were in host memory.
    """

    units: Sequence[UnitBytes]
    rules: StepRules
    terms: dict[str, int]
    moments: list[Moment] = field(default_factory=list)
    most_offloaded: int = 0

    def __post_init__(self) -> None:
        self.by_fqn = {unit.fqn: unit for unit in self.units}
        self.micro_batch = 0
        self.in_backward = False
        self.is_synced = True
        self.finished: set[str] = set()
        self.phase, self.is_evaluation = "forward", False
        self._offloaded: dict[str, tuple[int, int]] = {}  # bytes on the device, and in host memory
        self._last_block: tuple[str, tuple[int, int]] | None = None

    def step(self, tapes: Tapes) -> None:
        """Play the passes of all micro-batches of a step."""
        shown = min(self.rules.num_micro_batches, _SHOWN)
        for _ in range(shown):
            self._play_all(tapes.preparation)
        for number in range(shown):
            self.micro_batch = number
            self.is_synced = self.rules.sync_every_micro_batch or number == shown - 1
            self.finished.clear()
            self._play_all(tapes.training)

    def update(self) -> None:
        """The optimizer updates the weights; then gradients are freed."""
        self.note("", "optimizer")

    def evaluate(self, tapes: Tapes) -> None:
        """Play two batches of an evaluation after a step, and a save after that.

        What the first batch leaves gathered, the second one has.
        """
        self.is_evaluation = True
        self._play_all(tapes.evaluation)
        self._play_all(tapes.evaluation)
        self.end_evaluation()
        self.is_evaluation = False
        self.note("", "save", {BUFFERS_OF_SAVE: self.rules.save_bytes})

    def _play_all(self, tape: Sequence[Event]) -> None:
        self.in_backward, self.phase = False, "forward"
        for event in tape:
            self._play(event)

    def add(self, term: str, num_bytes: int) -> None:
        """Add bytes to a term."""
        self.terms[term] = self.terms.get(term, 0) + num_bytes

    def note(self, where: str, phase: str | None = None, extra: Mapping[str, int] | None = None) -> None:
        """Remember this moment, with `extra` bytes for it alone."""
        terms = {name: num for name, num in self.terms.items() if num}
        for name, num in (extra or {}).items():
            if num:
                terms[name] = terms.get(name, 0) + num
        self.moments.append(Moment(EVALUATION if self.is_evaluation else phase or self.phase, where, terms))

    def _play(self, event: Event) -> None:
        self.play_bytes(event)
        unit, key = self.by_fqn.get(event.module), (event.is_reference, event.module)
        match event.kind:
            case "loss":
                self.phase, self.in_backward = "backward", True
            case "end":
                self.end_backward()
            case _ if unit is None:
                pass
            case "enter":
                self.enter(key, unit)
            case "leave":
                self.leave(key, unit)
                if not unit.fqn:
                    self.phase = "loss"
            case "begin backward":
                self.begin(key, unit)
            case "finish backward" if not event.is_reference:
                self.finished.add(unit.fqn)
                self.finish(unit)
        if event.kind == ENTER and not event.module and not self.in_backward:
            self.phase = "forward"
        if self.rules.offloads_activations:
            self._offload(event)

    def play_bytes(self, event: Event) -> None:
        """The activations and gradients since the event before."""
        is_alone = self.micro_batch > 0 and self.keeps_autograd_gradients
        self.note_rise(event, event.rise_alone if is_alone else event.rise)
        if not is_alone:
            self.add(UNREDUCED, event.gradients)

    def note_rise(self, event: Event, rise: int) -> None:
        """The most since the event before, and what is left."""
        term = LOSS_TERM if self.phase == "loss" else ACTIVATIONS
        self.note(event.module, extra={term: rise})
        self.add(ACTIVATIONS, event.change)

    @property
    def keeps_autograd_gradients(self) -> bool:
        """Whether later micro-batches add to the gradients that autograd has made."""
        return False

    def _offload(self, event: Event) -> None:
        """Let what a block saved leave after the block behind it, and come back before its own backward pass."""
        if event.kind == LEAVE and event.saved and not event.is_reference and not self.in_backward:
            if self._last_block is not None:
                name, saved = self._last_block
                self._offloaded[name] = saved
                self.add(ACTIVATIONS, -saved[0])
                on_host = sum(pinned for _, pinned in self._offloaded.values())
                self.most_offloaded = max(self.most_offloaded, on_host)
            self._last_block = event.module, (event.saved, event.pinned)
        elif event.kind == BEGIN and (event.module in self._offloaded or self._is_last_block(event.module)):
            order = [*self._offloaded]
            for name in [event.module, *(order[-1:] if event.module not in order else order[-2:-1])]:
                self.add(ACTIVATIONS, self._offloaded.pop(name, (0, 0))[0])
            self._last_block = None

    def _is_last_block(self, name: str) -> bool:
        return self._last_block is not None and self._last_block[0] == name

    def enter(self, key: _Key, unit: UnitBytes) -> None:
        """A module is called, in the forward pass or where it is computed again."""

    def leave(self, key: _Key, unit: UnitBytes) -> None:
        """A call ends."""

    def begin(self, key: _Key, unit: UnitBytes) -> None:
        """The backward pass of a module begins."""

    def finish(self, unit: UnitBytes) -> None:
        """The gradients of a module are there."""

    def end_backward(self) -> None:
        """The backward pass ends."""

    def end_evaluation(self) -> None:
        """An evaluation ends."""


class DdpPlayer(Player):
    """DistributedDataParallel: gradients are views of buckets that are there all the time; nothing is gathered.

    Those of micro-batches that are not reduced are kept besides the buckets until the last one.
    """

    def play_bytes(self, event: Event) -> None:
        is_first = self.micro_batch == 0
        rise = event.rise if is_first and not self.is_synced else event.rise_alone
        self.note_rise(event, rise)
        if is_first and not self.is_synced:
            self.add(UNREDUCED, event.gradients)
        elif not is_first and self.is_synced and not self.rules.sync_every_micro_batch:
            self.add(UNREDUCED, -event.gradients)


class _GatheringPlayer(Player):
    """What both FSDPs have in common."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gathered: set[_Key] = set()
        self.order: list[_Key] = []  # in which modules were left
        self.has_sharded: set[str] = set()  # units with a gradient of an earlier micro-batch
        self.entered: dict[str, None] = {}

    def unshard(self, key: _Key, unit: UnitBytes) -> None:
        """Gather the parameters of a unit."""
        raise NotImplementedError

    def unshard_one_before(self, key: _Key) -> None:
        """Gather the unit that was left before this one, whose backward pass comes next."""
        if key in self.order:
            position = len(self.order) - 1 - self.order[::-1].index(key)
            if position > 0:
                before = self.order[position - 1]
                self.unshard(before, self.by_fqn[before[1]])

    def free(self, key: _Key, unit: UnitBytes) -> None:
        """Free the gathered parameters."""
        if key in self.gathered:
            self.gathered.discard(key)
            self.add(GATHERED, -unit.gathered)

    def receive(self, unit: UnitBytes) -> None:
        """Take a part of reduced gradients, which are in the buffers, for the gradient, or add it to that."""
        rules = self.rules
        if rules.casts_reduced:
            self.note(unit.fqn, "reduce", {BUFFERS: unit.kept})
        elif unit.fqn in self.has_sharded:
            self.note(unit.fqn, "reduce")
        self.add(BUFFERS, -unit.reduced)
        if not rules.has_host_gradients and unit.fqn not in self.has_sharded:
            self.add(GRADIENTS, unit.kept)
        self.has_sharded.add(unit.fqn)


class Fsdp2Player(_GatheringPlayer):
    """`fully_shard`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gathering: set[_Key] = set()  # with an all-gather whose output is not copied out
        self.resharded: set[_Key] = set()  # over N ranks
        self.stale: set[_Key] = set()  # the same of an evaluation, which stays until it is resharded again
        self.pending: UnitBytes | None = None  # whose output is kept during the next gather
        self.buffer = 0  # input of the last reduction
        self.accumulated: set[str] = set()
        names = [unit.fqn for unit in self.units if unit.fqn]
        self._position = {name: number for number, name in enumerate(names)}
        self._names = names

    @property
    def keeps_autograd_gradients(self) -> bool:
        return not self.rules.sync_every_micro_batch and not self.rules.casts_gradients

    def enter(self, key: _Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        self._copy_out(key, unit, keeps_output=not self.in_backward)
        if not self.in_backward:
            self._prefetch(key, self.rules.prefetch_forward, 1)

    def leave(self, key: _Key, unit: UnitBytes) -> None:
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

    def begin(self, key: _Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        self._copy_out(key, unit, keeps_output=False)
        if self.rules.prefetch_backward > 0 and self._has_explicit(key):
            self._prefetch(key, self.rules.prefetch_backward, -1)
        else:
            self.unshard_one_before(key)

    def finish(self, unit: UnitBytes) -> None:
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
        if self.rules.keeps_reduced and self.rules.casts_reduced:
            self.add(BUFFERS, unit.reduced)
        self.receive(unit)
        self.buffer = unit.reduced_from

    def end_backward(self) -> None:
        for unit in (self.units[-1], *self.units[:-1]):
            if unit.fqn not in self.finished:
                self.finish(unit)
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
        if not self.rules.casts_gradients:
            return
        if unit.fqn not in self.accumulated:
            self.accumulated.add(unit.fqn)
            self.add(UNREDUCED, unit.reduced_from)
            self.note(unit.fqn)
        self.add(UNREDUCED, -unit.gradients)

    def _has_explicit(self, key: _Key) -> bool:
        """Whether there are units to prefetch by the settings; torch's default is the one that ran before."""
        return self.rules.prefetch_backward > 1 and self._position.get(key[1], 0) > 0

    def _prefetch(self, key: _Key, number: int, direction: int) -> None:
        if key[1] not in self._position:
            return
        at = self._position[key[1]]
        positions = range(at + direction, at + direction * (number + 1), direction)
        for name in (self._names[position] for position in positions if 0 <= position < len(self._names)):
            self.unshard((key[0], name), self.by_fqn[name])

    def unshard(self, key: _Key, unit: UnitBytes) -> None:
        """Gather the shards in one buffer."""
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

    def _copy_out(self, key: _Key, unit: UnitBytes, *, keeps_output: bool) -> None:
        """Copy parameters out of the buffer."""
        if key not in self.gathering:
            return
        self.gathering.discard(key)
        self.gathered.add(key)
        self.add(GATHERED, unit.gathered)
        self.note(unit.fqn, extra={GATHERED: unit.largest_cast if unit.num_shards == 1 else 0})
        if keeps_output:
            self._free_pending()  # a variable of torch's `wait_for_unshard` holds it until here
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


class Fsdp1Player(_GatheringPlayer):
    """FullyShardedDataParallel: the parameters of a unit are one flat one, and so is their gradient."""

    def enter(self, key: _Key, unit: UnitBytes) -> None:
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

    def leave(self, key: _Key, unit: UnitBytes) -> None:
        if self.in_backward:
            return
        self.order.append(key)
        if unit.num_shards == 1 or (unit.fqn and self.rules.reshard is not False):
            self.free(key, unit)

    def begin(self, key: _Key, unit: UnitBytes) -> None:
        self.unshard(key, unit)
        if self.rules.prefetch_backward:
            self.unshard_one_before(key)

    def finish(self, unit: UnitBytes) -> None:
        key = (False, unit.fqn)
        frees = self.is_synced or self.rules.reshard is not False or unit.num_shards == 1
        if not unit.gradients:
            self.free(key, unit) if frees else None
            return
        self.note(unit.fqn, extra={UNREDUCED: unit.gradients})  # from those of parameters to a flat one
        if frees:
            self.free(key, unit)
        if not self.is_synced:
            if unit.fqn in self.has_sharded:  # the flat gradient of an earlier micro-batch
                self.add(UNREDUCED, -unit.gradients)
            self.has_sharded.add(unit.fqn)
            return
        if not self.rules.sync_every_micro_batch and unit.fqn in self.has_sharded:
            self.add(UNREDUCED, -unit.gradients)
            self.has_sharded.discard(unit.fqn)
        self._reduce(unit)

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

    def unshard(self, key: _Key, unit: UnitBytes) -> None:
        if key in self.gathered or not unit.gathered:
            return
        self.gathered.add(key)
        self.add(GATHERED, unit.gathered)
        self.note(unit.fqn, extra={GATHERED: unit.cast if unit.num_shards > 1 else 0})


PLAYERS: Mapping[str, type[Player]] = {"fsdp2": Fsdp2Player, "fsdp1": Fsdp1Player, "ddp": DdpPlayer}


def highest(moments: Iterable[Moment]) -> Moment:
    """The moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total_bytes)


__all__ = ["END", "FINISH", "LOSS", "PLAYERS", "Moment", "Player", "StepRules", "UnitBytes", "highest"]
