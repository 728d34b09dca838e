"""What one micro-batch keeps in memory between entering one module and leaving the next, as events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ENTER, LEAVE, LOSS, BEGIN, FINISH, END = "enter", "leave", "loss", "begin backward", "finish backward", "end"
DONE = "done"  # with a pass without gradients


@dataclass(frozen=True, slots=True)
class Event:
    """A module is entered or left, and what happened to the live bytes since the event before.

    Attributes:
        kind: One of the constants above.
        module: FQN of the module; "" is the root.
        rise: The most bytes that were live since, above those that were live then.
        rise_alone: The same, if each gradient were gone as soon as it is accumulated.
        change: Bytes of activations that are live now, minus those then.
        gradients: Bytes of gradients that were accumulated since.
        saved: When a block is left: bytes that it saved for its backward pass.
        pinned: The same in page-locked memory, of which torch allocates powers of two.
        is_reference: Whether the reference of an objective runs, without gradients.
    """

    kind: str
    module: str
    rise: int
    rise_alone: int
    change: int
    gradients: int
    saved: int = 0
    pinned: int = 0
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Recordings:
    """What one micro-batch keeps in memory in each kind of pass.

    Attributes:
        preparation: What the losses of a step have in common, computed without gradients; empty if they have nothing.
        training: From the first forward pass to the end of the backward pass.
        evaluation: The loss of held-out samples, without gradients.
        extra: Passes of other phases without gradients, by phase, in parts that each begin at the same state.
        uncounted: Why one of them could not be measured, by phase.
    """

    preparation: Sequence[Event]
    training: Sequence[Event]
    evaluation: Sequence[Event]
    extra: Mapping[str, Sequence[Sequence[Event]]] = field(default_factory=dict)
    uncounted: Mapping[str, str] = field(default_factory=dict)
