"""A micro-batch on a rank's device, the input of the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from fsdp_shard.data import IGNORE_INDEX
from fsdp_shard.sharding import WholeSequence


@dataclass(frozen=True)
class PackedAnswers:
    """Assigns the tokens of a micro-batch to answers, where rows hold several answers.

    Attributes:
        segments: The segment of each token, as in `Batch`, int64 [num_rows, length], if answers share prompts; None if
            they do not, and if a plan needs no values.
        sizes: Number of trained labels in each answer; the chosen answer of a pair comes first.
        lengths: The same numbers on the device, float32 [num_answers].
        has_two_rows: Whether the two answers of a pair are in separate rows, of which a pass processes one
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
        sequence: The information about whole sequences that this rank needs.
        token_positions: Positions of its tokens in the sequences, int64 [part]; positions after the end are padding.
        label_positions: Positions of the trained labels in the flattened own tokens, int64.
        label_indices: Indices of these labels among the trained labels of the whole micro-batch, int64.
    """

    inputs: dict[str, torch.Tensor]
    sequence: WholeSequence
    token_positions: torch.Tensor
    label_positions: torch.Tensor
    label_indices: torch.Tensor

    def rows(self, row: int, labels: torch.Tensor) -> "OwnPart":
        """Return row 0 or 1 of each two-row sample; `labels` are those of these rows, for whole sequences."""
        inputs = {name: value[row::2] for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, sequence=self.sequence.rows(row)).of(labels)

    def of(self, labels: torch.Tensor) -> "OwnPart":
        """Return this part with other labels for the whole sequences, int64 [num_rows, length]."""
        label_positions, label_indices = own_label_positions(labels, self.token_positions)
        return replace(self, label_positions=label_positions, label_indices=label_indices)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield from self.sequence.tensors()
        yield from (self.token_positions, self.label_positions, self.label_indices)


def own_label_positions(labels: torch.Tensor, token_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `label_positions` and `label_indices` of an `OwnPart` from whole labels [num_rows, length]."""
    is_trained = labels != IGNORE_INDEX
    numbers = torch.where(is_trained, is_trained.flatten().cumsum(0).view(labels.shape) - 1, -1)
    inside = token_positions < labels.shape[1]
    own = torch.where(inside, numbers[:, torch.where(inside, token_positions, 0)], -1).flatten()
    label_positions = torch.nonzero(own >= 0).flatten()
    return label_positions, own[label_positions]


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on this rank's device.

    Attributes:
        inputs: Arguments of the model by name, int64 [micro_batch_size, length].
        labels: Labels as in `Batch`, int64.
        label_positions: Positions of the trained labels in the flattened labels, int64 [num_predictions].
            Found on the CPU, to avoid waiting for a GPU.
        extras: Additional values of each sample, as in `Batch`, float32.
        token_values: Values of each trained label, as in `Batch`.
        sequence: The information about whole sequences that this rank needs, if it holds parts of them.
        packed: The answers, if rows hold several.
        own: This rank's tokens, if sequences are divided and all other attributes describe whole sequences.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    label_positions: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    token_values: dict[str, torch.Tensor] = field(default_factory=dict)
    sequence: WholeSequence | None = None
    packed: PackedAnswers | None = None
    own: OwnPart | None = None

    @property
    def answer_lengths(self) -> torch.Tensor:
        """Number of trained labels in each answer, float32 [num_answers]; without packing, in each row."""
        return (self.labels != IGNORE_INDEX).sum(-1).float() if self.packed is None else self.packed.lengths

    def answer_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` [num_rows, length] over the trained labels of each answer, [num_answers].

        Without packing, each row is an answer, and `values` must be 0 for other labels.
        """
        if self.packed is None:
            return values.sum(-1)
        if self.packed.has_two_rows:
            raise ValueError("the answers of a pair are in two rows; take one of them")
        if not self.packed.sizes:
            return values.flatten()[:0]
        parts = values.flatten()[self.label_positions].split(self.packed.sizes)
        return torch.stack([part.sum() for part in parts])

    def of_row(self, row: int) -> "DeviceBatch":
        """Return row 0 or 1 of each two-row sample. Counting the labels waits for a GPU."""
        labels = self.labels[row::2]
        return replace(
            self,
            inputs={name: value[row::2] for name, value in self.inputs.items()},
            labels=labels,
            label_positions=torch.nonzero(labels.flatten() != IGNORE_INDEX).flatten(),
            extras={name: value[:, row : row + 1] for name, value in self.extras.items() if value.ndim > 1},
            sequence=None if self.sequence is None else self.sequence.rows(row),
            packed=None if self.packed is None else self.packed.of_row(row),
            own=None if self.own is None else self.own.rows(row, labels),
        )

    def with_labels(self, labels: torch.Tensor) -> "DeviceBatch":
        """Return the batch with other labels, int64 [num_rows, length]. Counting them waits for a GPU."""
        label_positions = torch.nonzero(labels.flatten() != IGNORE_INDEX).flatten()
        return replace(
            self, labels=labels, label_positions=label_positions, own=None if self.own is None else self.own.of(labels)
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield self.labels
        yield self.label_positions
        yield from self.extras.values()
        yield from self.token_values.values()
        yield from () if self.sequence is None else self.sequence.tensors()
        yield from () if self.own is None else self.own.tensors()
        if self.packed is not None:
            yield self.packed.lengths
            yield from () if self.packed.segments is None else [self.packed.segments]
