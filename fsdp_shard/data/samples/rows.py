"""Examples as samples, one per window: truncated if they are too long, padded if they are short.

There are three shapes: text of which some tokens are predicted, a source and a target, and a text and its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import MASKED, NO_WINDOW, Batch, Indices, Ints
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.tokenized.token_file import Examples

# Batches are padded to a multiple of this: kernels are faster, and there are fewer shapes to compile for.
_WIDTH_UNIT = 8


@dataclass(frozen=True)
class Cut:
    """What truncation leaves: `kept` [num_kept] examples, of which `num_truncated` were longer; `num_dropped` others
    have nothing left to predict.
    """

    kept: Ints
    num_truncated: int
    num_dropped: int


def cut_causal(examples: Examples, sequence_length: int) -> Cut:
    """Keep the examples with a token to predict from those before it, among `sequence_length` inputs."""
    lengths = np.minimum(examples.lengths, sequence_length + 1)
    usable = (examples.first >= 0) & (np.maximum(examples.first, 1) < lengths)
    return cut_rows(usable, examples.lengths > sequence_length + 1)


def cut_rows(usable: npt.NDArray[np.bool_], longer: npt.NDArray[np.bool_]) -> Cut:
    """Keep the `usable` of all examples [num_examples], of which some are `longer` than a window."""
    kept = np.flatnonzero(usable)
    return Cut(kept, int(np.count_nonzero(longer[kept])), len(usable) - len(kept))


@dataclass(frozen=True)
class RowDataset(MapDataset):
    """The examples `kept` of `examples`, each truncated to `sequence_length`; the base of one example per sample."""

    examples: Examples
    kept: Ints
    sequence_length: int
    part: str = ""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}:{self.examples.name}{self.part}:{len(self)}/{self.sequence_length}"

    def slice(self, first: int, last: int) -> Self:
        return replace(self, kept=self.kept[first:last], part=f"{self.part}+{first}")

    def _chosen(self, indices: Indices) -> list[int | None]:
        """Return the example behind each of `indices`; None for NO_WINDOW."""
        return [None if index == NO_WINDOW else int(self.kept[self.checked(int(index))]) for index in indices]


class CausalRows(RowDataset):
    """One example per window; the tokens that it marks are predicted from those before them."""

    @property
    def summary(self) -> str:
        return f"each in a window of up to {self.sequence_length}"

    def batch(self, indices: Indices) -> Batch:
        rows = [next_tokens(self.examples, index, self.sequence_length) for index in self._chosen(indices)]
        input_ids = stack([inputs for inputs, _ in rows], 0, self.sequence_length)
        return Batch(input_ids, stack([labels for _, labels in rows], MASKED, self.sequence_length))


def next_tokens(examples: Examples, index: int | None, sequence_length: int) -> tuple[Ints, Ints]:
    """Return inputs and labels, both [length], of one example: the label of a token is the next token, or MASKED."""
    if index is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    tokens, predicted = examples.tokens_of(index)
    ids = tokens[: sequence_length + 1].astype(np.int64)
    labels = np.where(predicted[1 : len(ids)] != 0, ids[1:], MASKED)
    return ids[:-1], labels


def stack(rows: Sequence[Ints], padding: int, longest: int) -> Ints:
    """Stack rows to [num_rows, width], padded at the end; the width is the longest, rounded up to a multiple of 8."""
    width = max(1, *(len(row) for row in rows))
    width = min(-(-width // _WIDTH_UNIT) * _WIDTH_UNIT, max(width, longest))
    stacked = np.full((len(rows), width), padding, np.int64)
    for row, values in zip(stacked, rows, strict=True):
        row[: len(values)] = values
    return stacked


def cut_pairs(examples: Examples, sequence_length: int, target_length: int) -> Cut:
    """Keep the examples with a source and a target; those of which either is longer count as truncated."""
    targets = examples.lengths - examples.first
    longer = (examples.first > sequence_length) | (targets > target_length)
    return cut_rows((examples.first > 0) & (targets > 0), longer)


def cut_texts(examples: Examples, sequence_length: int) -> Cut:
    """Keep the examples with a text."""
    return cut_rows(examples.lengths > 0, examples.lengths > sequence_length)


@dataclass(frozen=True)
class Seq2SeqRows(RowDataset):
    """The encoder reads the source; the decoder predicts each token of the target from those before it."""

    target_length: int = 0
    decoder_start: int = 0
    padding: int = 0

    @property
    def identity(self) -> str:
        return f"{super().identity}/{self.target_length}"

    @property
    def summary(self) -> str:
        return f"sources of up to {self.sequence_length} and targets of up to {self.target_length}"

    def batch(self, indices: Indices) -> Batch:
        sources, targets = [], []
        for index in self._chosen(indices):
            if index is None:
                sources.append(np.zeros(1, np.int64))  # attention needs at least one token
                targets.append(np.full(1, MASKED, np.int64))
                continue
            ids, split = self.examples.tokens_of(index)[0].astype(np.int64), int(self.examples.first[index])
            sources.append(truncated(ids[:split], self.sequence_length, self.examples.keeps_last))
            targets.append(ids[split:][: self.target_length])
        labels = stack(targets, MASKED, self.target_length)
        starts = np.full((len(labels), 1), self.decoder_start)
        shifted = np.concatenate([starts, np.where(labels == MASKED, self.decoder_start, labels)[:, :-1]], axis=1)
        input_ids, attention_mask = padded(sources, self.sequence_length, self.padding)
        return Batch(input_ids, labels, {"attention_mask": attention_mask, "decoder_input_ids": shifted}, self.padding)


@dataclass(frozen=True)
class LabeledRows(RowDataset):
    """One text per sample, with the index of its class; `numbers` are the model's indices of the classes."""

    numbers: tuple[int, ...] = ()
    padding: int = 0

    @property
    def summary(self) -> str:
        return f"{len(self.numbers)} classes"

    def batch(self, indices: Indices) -> Batch:
        texts, labels = [], []
        for index in self._chosen(indices):
            # Without labels there is still a text: some models look for the token that ends it.
            text = int(self.kept[0]) if index is None else index
            ids = self.examples.tokens_of(text)[0].astype(np.int64)
            texts.append(truncated(ids, self.sequence_length, self.examples.keeps_last))
            labels.append(MASKED if index is None else self.numbers[int(self.examples.labels[index])])
        input_ids, attention_mask = padded(texts, self.sequence_length, self.padding)
        return Batch(input_ids, np.asarray(labels, np.int64), {"attention_mask": attention_mask}, self.padding)


def padded(rows: Sequence[Ints], longest: int, padding: int) -> tuple[Ints, Ints]:
    """Stack rows; return the tokens and the attention mask."""
    return stack(rows, padding, longest), stack([np.ones(len(row), np.int64) for row in rows], 0, longest)


def truncated(ids: Ints, longest: int, keeps_last: bool) -> Ints:
    """Truncate `ids` to `longest`; with `keeps_last` the token that ends the text remains the last."""
    if len(ids) <= longest:
        return ids
    return np.concatenate([ids[: longest - 1], ids[-1:]]) if keeps_last else ids[:longest]
