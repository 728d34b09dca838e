"""A micro-batch on the device of a rank: what a loss is computed from."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fsdp_shard.data import MASKED
from fsdp_shard.sharding import WholeSequence


@dataclass(frozen=True)
class PackedAnswers:
    """Which tokens of a micro-batch are those of which answer, where rows have several pairs that share prompts.

    Attributes:
        segments: What each token belongs to, as in `Batch`, int64 [num_rows, length]; None where a plan needs no
            values.
        sizes: Number of labels that count of each answer, in their order; the chosen answer of a pair is first.
        lengths: The same on the device, float32 [num_answers].
    """

    segments: torch.Tensor | None
    sizes: tuple[int, ...]
    lengths: torch.Tensor


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device of this rank.

    Attributes:
        inputs: Arguments of the model by name, int64 [micro_batch_size, length].
        labels: Labels as in `Batch`, int64.
        counted: Positions in the flat labels of those that count, int64 [num_predictions]. Counted on the CPU: a GPU
            would have to be waited for.
        extras: Other values of each sample as in `Batch`, float32.
        token_values: Values of each label that counts as in `Batch`.
        sequence: What this rank must know of the whole sequences, where it has parts of them.
        packed: The answers of packed pairs.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    counted: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    token_values: dict[str, torch.Tensor] = field(default_factory=dict)
    sequence: WholeSequence | None = None
    packed: PackedAnswers | None = None

    @property
    def answer_lengths(self) -> torch.Tensor:
        """Number of labels that count of each answer, float32 [num_answers]; without packing, of each row."""
        return (self.labels != MASKED).sum(-1).float() if self.packed is None else self.packed.lengths

    def answer_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` [num_rows, length] over the labels that count of each answer, [num_answers].

        Without packing each row is an answer, and `values` are 0 for other labels.
        """
        if self.packed is None:
            return values.sum(-1)
        if not self.packed.sizes:
            return values.flatten()[:0]
        parts = values.flatten()[self.counted].split(self.packed.sizes)
        return torch.stack([part.sum() for part in parts])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield self.labels
        yield self.counted
        yield from self.extras.values()
        yield from self.token_values.values()
        yield from () if self.sequence is None else self.sequence.tensors()
        if self.packed is not None:
            yield self.packed.lengths
            yield from () if self.packed.segments is None else [self.packed.segments]
