"""A micro-batch on the device of a rank: what a loss is computed from."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from fsdp_shard.data import MASKED
from fsdp_shard.sharding import WholeSequence


@dataclass(frozen=True)
class PackedAnswers:
    """Which tokens of a micro-batch are those of which answer, where rows have several answers.

    Attributes:
        segments: What each token belongs to, as in `Batch`, int64 [num_rows, length], where answers share prompts; None
            where they do not, and where a plan needs no values.
        sizes: Number of labels that count of each answer; the chosen answer of a pair is first.
        lengths: The same on the device, float32 [num_answers].
        has_two_rows: Whether both answers of pairs are in rows of their own, of which a pass takes one
            (`DeviceBatch.of_row`).
    """

    segments: torch.Tensor | None
    sizes: tuple[int, ...]
    lengths: torch.Tensor
    has_two_rows: bool = False

    def of_row(self, row: int) -> "PackedAnswers":
        """Return the answers in row 0 or 1 of each sample of two rows."""
        return replace(self, sizes=self.sizes[row::2], lengths=self.lengths[row::2], has_two_rows=False)


@dataclass(frozen=True)
class OwnPart:
    """This rank's tokens of a micro-batch, for an objective that compares whole sequences.

    Attributes:
        inputs: Arguments of the model by name, int64 [num_rows, part].
        sequence: What this rank must know of the whole sequences.
        places: Where its tokens are in them, int64 [part]; those after the end are padding.
        counted: Positions in the flat own tokens of those whose labels count, int64.
        chosen: Which of the labels that count in the whole micro-batch these are, int64.
    """

    inputs: dict[str, torch.Tensor]
    sequence: WholeSequence
    places: torch.Tensor
    counted: torch.Tensor
    chosen: torch.Tensor

    def rows(self, row: int, labels: torch.Tensor) -> "OwnPart":
        """Return row 0 or 1 of each sample of two rows; `labels` are theirs, of whole sequences."""
        inputs = {name: value[row::2] for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, sequence=self.sequence.rows(row)).of(labels)

    def of(self, labels: torch.Tensor) -> "OwnPart":
        """Return this part for other labels of the whole sequences, int64 [num_rows, length]."""
        counted, chosen = own_counted(labels, self.places)
        return replace(self, counted=counted, chosen=chosen)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield from self.sequence.tensors()
        yield from (self.places, self.counted, self.chosen)


def own_counted(labels: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `counted` and `chosen` of an `OwnPart` from the labels of whole sequences, int64 [num_rows, length]."""
    is_counted = labels != MASKED
    numbers = torch.where(is_counted, is_counted.flatten().cumsum(0).view(labels.shape) - 1, -1)
    inside = places < labels.shape[1]
    own = torch.where(inside, numbers[:, torch.where(inside, places, 0)], -1).flatten()
    counted = torch.nonzero(own >= 0).flatten()
    return counted, own[counted]


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
        packed: The answers, where rows have several.
        own: This rank's tokens, where sequences are divided and all else here is of the whole ones.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    counted: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    token_values: dict[str, torch.Tensor] = field(default_factory=dict)
    sequence: WholeSequence | None = None
    packed: PackedAnswers | None = None
    own: OwnPart | None = None

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
        if self.packed.has_two_rows:
            raise ValueError("the answers of a pair are in two rows; take one of them")
        if not self.packed.sizes:
            return values.flatten()[:0]
        parts = values.flatten()[self.counted].split(self.packed.sizes)
        return torch.stack([part.sum() for part in parts])

    def of_row(self, row: int) -> "DeviceBatch":
        """Return row 0 or 1 of each sample of two rows. A GPU is waited for to count the labels."""
        labels = self.labels[row::2]
        return replace(
            self,
            inputs={name: value[row::2] for name, value in self.inputs.items()},
            labels=labels,
            counted=torch.nonzero(labels.flatten() != MASKED).flatten(),
            extras={name: value[:, row : row + 1] for name, value in self.extras.items() if value.ndim > 1},
            packed=None if self.packed is None else self.packed.of_row(row),
            own=None if self.own is None else self.own.rows(row, labels),
        )

    def with_labels(self, labels: torch.Tensor) -> "DeviceBatch":
        """Return the batch with other labels, int64 [num_rows, length]. A GPU is waited for to count them."""
        counted = torch.nonzero(labels.flatten() != MASKED).flatten()
        return replace(self, labels=labels, counted=counted, own=None if self.own is None else self.own.of(labels))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield self.labels
        yield self.counted
        yield from self.extras.values()
        yield from self.token_values.values()
        yield from () if self.sequence is None else self.sequence.tensors()
        yield from () if self.own is None else self.own.tensors()
        if self.packed is not None:
            yield self.packed.lengths
            yield from () if self.packed.segments is None else [self.packed.segments]
