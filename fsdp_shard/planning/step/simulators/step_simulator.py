"""Simulates a training step of one rank, unit by unit: the memory at each point, term by term.

Pure Python: the recording contains the activations and gradients of the unsharded model. A subclass adds its wrapper's
memory, following torch's code.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_shard.planning.step.recording import events
from fsdp_shard.planning.step.recording.events import (
    POST_BACKWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    PRE_FORWARD,
    Event,
    Recordings,
)
from fsdp_shard.planning.step.snapshot import (
    ACTIVATIONS,
    BUFFERS_OF_SAVE,
    COMPLETIONS,
    EVALUATION,
    LOSS_TERM,
    TEACHER_PASS,
    UNREDUCED,
    Snapshot,
)
from fsdp_shard.planning.step.unit_bytes import UnitBytes

_SHOWN = 3  # micro-batches; all are identical from the third on

Key = tuple[bool, str]  # (whether it belongs to the reference model, FQN)


@dataclass(frozen=True)
class StepRules:
    """The settings that determine how a step runs.

    Attributes:
        reshard: As in `shard.reshard_after_forward`.
        prefetch_forward: Number of units gathered ahead in the forward pass.
        prefetch_backward: The same in the backward pass.
        num_micro_batches: Number of micro-batches.
        sync_every_micro_batch: Whether gradients are reduced after every micro-batch.
        gradient_itemsize: Bytes per gradient element after the backward pass.
        casts_gradients: Whether gradients are reduced in a dtype other than the compute dtype.
        casts_reduced: Whether they are reduced in a dtype other than that of the parameters.
        keeps_reduced: Whether reduced gradients also stay until the end of the backward pass (replicas).
        copies_reduced: Whether the collective copies what it reduces (gloo).
        offloads_activations: Whether tensors saved by blocks are in CPU memory until they are used.
        has_host_gradients: Whether reduced gradients are in CPU memory.
        save_bytes: Temporary bytes of a save.
        teacher_pass_bytes: Temporary bytes of a teacher's pass before each micro-batch.
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
    teacher_pass_bytes: int = 0


@dataclass
class StepSimulator:
    """Replays the recording of a micro-batch; each wrapper has a subclass.

    Attributes:
        units: The units, the root last.
        rules: The settings of the step.
        terms: Bytes in use now, by term; they include the state from the start.
        snapshots: The snapshots taken so far.
        most_offloaded: Maximum bytes of activations in host memory.
    """

    units: Sequence[UnitBytes]
    rules: StepRules
    terms: dict[str, int]
    snapshots: list[Snapshot] = field(default_factory=list)
    most_offloaded: int = 0

    def __post_init__(self) -> None:
        self.by_fqn = {unit.fqn: unit for unit in self.units}
        self.micro_batch = 0
        self.in_backward = False
        self.is_synced = True
        self.finished: set[str] = set()
        self.phase, self.without_gradients = "forward", ""  # the phase of a pass without gradients
        self._offloaded: dict[str, tuple[int, int]] = {}  # (bytes on the device, bytes in host memory)
        self._last_block: tuple[str, tuple[int, int]] | None = None
        self._to_finish = Counter[str]()  # calls of each module whose backward pass is yet to end

    def step(self, recordings: Recordings) -> None:
        """Simulate the passes of all micro-batches of a step."""
        shown = min(self.rules.num_micro_batches, _SHOWN)
        for _ in range(shown):
            self._replay(recordings.preparation)
        for number in range(shown):
            self.micro_batch = number
            self.is_synced = self.rules.sync_every_micro_batch or number == shown - 1
            self.finished.clear()
            self._run_teacher()
            self._replay(recordings.training)

    def update(self) -> None:
        """The optimizer updates the weights; then gradients are freed."""
        self.note("", "optimizer")

    def evaluate(self, recordings: Recordings) -> None:
        """Simulate two batches of an evaluation after a step, completions, and a save after that.

        What the first batch leaves gathered is still gathered in the second.
        """
        self.run_without_gradients(EVALUATION, [recordings.evaluation] * 2)
        self.run_without_gradients(COMPLETIONS, recordings.extra.get(COMPLETIONS, ()))
        self.note("", "save", {BUFFERS_OF_SAVE: self.rules.save_bytes})

    def run_without_gradients(self, phase: str, parts: Sequence[Sequence[Event]]) -> None:
        """Simulate passes in eval mode, in parts that all start from the same state."""
        self.without_gradients, kept = phase, self.terms.get(ACTIVATIONS, 0)
        if phase == EVALUATION:
            self._run_teacher()
        for part in parts:
            self._replay(part)
            self.terms[ACTIVATIONS] = kept
        self.end_evaluation()
        self.without_gradients = ""

    def _run_teacher(self) -> None:
        """Run the teacher over a micro-batch before the model."""
        if self.rules.teacher_pass_bytes:
            self.note("", "forward", {TEACHER_PASS: self.rules.teacher_pass_bytes})

    def _replay(self, recording: Sequence[Event]) -> None:
        self.in_backward, self.phase = False, "forward"
        self._to_finish = Counter(event.module for event in recording if event.kind == POST_BACKWARD)
        for event in recording:
            self._apply(event)

    def add(self, term: str, num_bytes: int) -> None:
        """Add bytes to a term."""
        self.terms[term] = self.terms.get(term, 0) + num_bytes

    def note(self, where: str, phase: str | None = None, extra: Mapping[str, int] | None = None) -> None:
        """Record a snapshot, with `extra` bytes for this one alone."""
        terms = {name: num for name, num in self.terms.items() if num}
        for name, num in (extra or {}).items():
            if num:
                terms[name] = terms.get(name, 0) + num
        self.snapshots.append(Snapshot(self.without_gradients or phase or self.phase, where, terms))

    def _apply(self, event: Event) -> None:
        self.apply_bytes(event)
        unit, key = self.by_fqn.get(event.module), (event.is_reference, event.module)
        match event.kind:
            case events.LOSS:
                self.phase, self.in_backward = "backward", True
            case events.END:
                self.end_backward()
            case _ if unit is None:
                pass
            case events.PRE_FORWARD:
                self.pre_forward(key, unit)
            case events.POST_FORWARD:
                self.post_forward(key, unit)
                if not unit.fqn:
                    self.phase = "loss"
            case events.PRE_BACKWARD:
                self.pre_backward(key, unit)
            case events.POST_BACKWARD if not event.is_reference:
                self._to_finish[unit.fqn] -= 1
                if self._to_finish[unit.fqn]:
                    self.post_backward_of_call(unit)
                else:
                    self.finished.add(unit.fqn)
                    self.post_backward(unit)
        if event.kind == PRE_FORWARD and not event.module and not self.in_backward:
            self.phase = "forward"
        if self.rules.offloads_activations:
            self._offload(event)

    def apply_bytes(self, event: Event) -> None:
        """Apply the activations and gradients since the previous event."""
        is_alone = self.micro_batch > 0 and self.keeps_autograd_gradients
        self.note_rise(event, event.rise_alone if is_alone else event.rise)
        if not is_alone:
            self.add(UNREDUCED, event.gradients)

    def note_rise(self, event: Event, rise: int) -> None:
        """Record the maximum since the previous event, and what remains."""
        term = LOSS_TERM if self.phase == "loss" else ACTIVATIONS
        self.note(event.module, extra={term: rise})
        self.add(ACTIVATIONS, event.change)

    @property
    def keeps_autograd_gradients(self) -> bool:
        """Whether later micro-batches add to the gradients that autograd created."""
        return False

    def _offload(self, event: Event) -> None:
        """Offload what a block saved once the next block has run; reload it before the block's backward pass."""
        if event.kind == POST_FORWARD and event.saved and not event.is_reference and not self.in_backward:
            if self._last_block is not None:
                name, saved = self._last_block
                self._offloaded[name] = saved
                self.add(ACTIVATIONS, -saved[0])
                on_host = sum(pinned for _, pinned in self._offloaded.values())
                self.most_offloaded = max(self.most_offloaded, on_host)
            self._last_block = event.module, (event.saved, event.pinned)
        elif event.kind == PRE_BACKWARD and (event.module in self._offloaded or self._is_last_block(event.module)):
            order = [*self._offloaded]
            for name in [event.module, *(order[-1:] if event.module not in order else order[-2:-1])]:
                self.add(ACTIVATIONS, self._offloaded.pop(name, (0, 0))[0])
            self._last_block = None

    def _is_last_block(self, name: str) -> bool:
        return self._last_block is not None and self._last_block[0] == name

    def pre_forward(self, key: Key, unit: UnitBytes) -> None:
        """Handle a module call, in the forward pass or when it is recomputed."""

    def post_forward(self, key: Key, unit: UnitBytes) -> None:
        """Handle the end of a call."""

    def pre_backward(self, key: Key, unit: UnitBytes) -> None:
        """Handle the start of a module's backward pass."""

    def post_backward_of_call(self, unit: UnitBytes) -> None:
        """Handle the end of a call's backward pass, if earlier calls of the module add to its gradients."""

    def post_backward(self, unit: UnitBytes) -> None:
        """Handle the completion of a module's gradients."""

    def end_backward(self) -> None:
        """Handle the end of the backward pass."""

    def end_evaluation(self) -> None:
        """Handle the end of an evaluation."""
