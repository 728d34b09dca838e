"""Events that describe the memory of one micro-batch between entering one module and leaving the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PRE_FORWARD, POST_FORWARD, LOSS = "pre-forward", "post-forward", "loss"
PRE_BACKWARD, POST_BACKWARD, END = "pre-backward", "post-backward", "end"
DONE = "done"  # all that a pass held is freed


@dataclass(frozen=True, slots=True)
class Event:
    """A module is entered or left, and the change of live bytes since the previous event.

    Attributes:
        kind: One of the constants above.
        module: FQN of the module; "" is the root.
        rise: Maximum live bytes since the previous event, above those live at that event.
        rise_alone: The same, if each gradient were freed as soon as it is accumulated.
        change: Bytes of activations live now, minus those live at the previous event.
        gradients: Bytes of gradients accumulated since the previous event.
        saved: When leaving a block: bytes that it saved for its backward pass.
        pinned: The same in pinned memory, which torch allocates in powers of two.
        is_reference: Whether an objective's reference model runs, without gradients.
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
    """The recordings of one micro-batch, for each kind of pass.

    Attributes:
        preparation: Computing what the losses of a step share, without gradients; empty if they share nothing.
        training: From the first forward pass to the end of the backward pass.
        evaluation: The loss of held-out samples, without gradients.
        extra: Passes of other phases without gradients, by phase, in parts that all start from the same state.
        uncounted: Why such a pass could not be measured, by phase.
    """

    preparation: Sequence[Event]
    training: Sequence[Event]
    evaluation: Sequence[Event]
    extra: Mapping[str, Sequence[Sequence[Event]]] = field(default_factory=dict)
    uncounted: Mapping[str, str] = field(default_factory=dict)
