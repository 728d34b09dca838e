"""The memory at one point of a run, term by term, and the shared names of terms and phases."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GATHERED, UNREDUCED, BUFFERS, GRADIENTS = "gathered", "unreduced gradients", "reduce buffers", "gradients"
ACTIVATIONS, LOSS_TERM, TEMPORARIES = "activations", "loss", "optimizer temporaries"
EVALUATION, COMPLETIONS, EVA = "evaluation", "completions", "eva"
DIRECTIONS = "principal directions"
BUFFERS_OF_SAVE, LOADING = "save buffers", "load buffers"
ZEROS = "gradients of zeros"
TEACHER, TEACHER_PASS = "teacher", "pass of the teacher"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory at one point of a run.

    Attributes:
        phase: load, eva, resume, forward, loss, backward, reduce, optimizer, evaluation, completions or save.
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


def highest(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The snapshot with the most bytes."""
    return max(snapshots, key=lambda snapshot: snapshot.total_bytes)


def highest_of_phases(snapshots: Iterable[Snapshot]) -> dict[str, Snapshot]:
    """The highest snapshot of each phase, in order."""
    by_phase: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        by_phase.setdefault(snapshot.phase, []).append(snapshot)
    return {phase: highest(found) for phase, found in by_phase.items()}
