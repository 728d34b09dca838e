"""Answers to compare as samples of two texts each, which become neighboring rows of a batch.

A pair has the chosen answer and the rejected one. A labeled answer has itself, and its prompt with the answer of
another sample, from which KTO (Ethayarajh et al., 2024) estimates how far the model is from the reference model. As in
TRL that is the sample before it, of the first sample the last one; if a row has several answers, it is that of the row
before it with the same position, as another answer to the same prompt would not mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.kinds.kind import CLASSIFICATION, PAIRS
from fsdp_shard.data.kinds.preference_formats import CHOSEN, DESIRABLE, LEFT_OUT, REJECTED, UNDESIRABLE, refuse_labeled
from fsdp_shard.data.samples.batch import MASKED, Floats, Ints, Sample, padded
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.samples.rows import Cut, RowDataset, next_labels, width_of
from fsdp_shard.data.task import Task
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.utils import format_count

DESIRABLE_VALUE, MARGIN = "desirable", "margin"  # names of extras


@dataclass(frozen=True)
class ComparedRows(RowDataset):
    """Samples of two texts, made of the examples `kept` [num_samples, 2].

    Attributes:
        extras: Other values by name, float32 [num_samples], or [num_samples, 2] with one for each text.
    """

    extras: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def num_pairs(self) -> int:
        """Number of values that `extras` have: one a sample, unless samples have several pairs."""
        return len(self.kept)

    def pairs_of(self, index: int) -> range:
        """Return the places in `extras` of the values of a sample."""
        return range(index, index + 1)

    @property
    def summary(self) -> str:
        return f"{format_count(len(self), 'pair')} of up to {self.sequence_length} tokens each"

    def slice(self, first: int, last: int) -> Self:
        return replace(
            super().slice(first, last), extras={name: values[first:last] for name, values in self.extras.items()}
        )

    def extras_of(self, index: int | None) -> dict[str, Floats]:
        """Return the values of a sample, zeros for None."""
        return {
            name: np.zeros(values.shape[1:], np.float32) if index is None else np.asarray(values[index])
            for name, values in self.extras.items()
        }


class PairedRows(ComparedRows):
    """The chosen and the rejected answer, each after its prompt; their tokens are predicted from those before them."""

    def answers_of(self, index: int) -> list[tuple[Ints, npt.NDArray[Any]]]:
        """Return the tokens of both texts and which of them are predicted."""
        return [self.examples.tokens_of(int(example)) for example in self.kept[index]]

    def _sample(self, index: int | None, epoch: int) -> Sample:
        empty = np.empty(0, np.int64)
        rows = [(empty, empty)] * 2
        if index is not None:
            rows = [next_labels(*answer, self.sequence_length) for answer in self.answers_of(index)]
        width = max(width_of(len(inputs), self.sequence_length) for inputs, _ in rows)
        ids = np.stack([padded(inputs, width) for inputs, _ in rows])
        labels = np.stack([padded(labels, width, MASKED) for _, labels in rows])
        return Sample({"input_ids": ids}, labels, extras=self.extras_of(index))


class LabeledAnswers(PairedRows):
    """An answer after its prompt, and its prompt with the answer of the second of two examples."""

    @property
    def summary(self) -> str:
        return f"{format_count(len(self), 'answer')} of up to {self.sequence_length} tokens"

    def answers_of(self, index: int) -> list[tuple[Ints, npt.NDArray[Any]]]:
        own, other = (
            [np.split(array, [self.examples.first[example]]) for array in self.examples.tokens_of(int(example))]
            for example in self.kept[index]
        )
        both = [np.concatenate([mine[0], others[1]]) for mine, others in zip(own, other, strict=True)]
        return [self.examples.tokens_of(int(self.kept[index, 0])), (both[0], both[1])]


@dataclass(frozen=True)
class RewardRows(ComparedRows):
    """The chosen and the rejected answer, each after its prompt, as the texts of a classifier; the labels are zeros."""

    padding: int = 0

    def _sample(self, index: int | None, epoch: int) -> Sample:
        # Without a label there are still texts: some models look for the token that ends them.
        found = [self.examples.tokens_of(int(example))[0].astype(np.int64) for example in self.kept[index or 0]]
        texts = [self.text_inputs(ids, self.padding) for ids in found]
        width = max(len(text["input_ids"]) for text in texts)
        inputs = {
            name: np.stack([padded(text[name], width, self.padding if name == "input_ids" else 0) for text in texts])
            for name in texts[0]
        }
        labels = np.full(2, MASKED if index is None else 0, np.int64)
        return Sample(inputs, labels, self.padding, extras=self.extras_of(index))


def with_extras(dataset: SourceDataset, name: str, values: npt.NDArray[Any]) -> SourceDataset:
    """Return samples to compare with further values, such as log-probabilities under a reference model.

    Args:
        dataset: The samples.
        name: Name of the values in `Sample.extras` and `Batch.extras`.
        values: A value for each text of each sample, or pair in it, [num_pairs, 2]; becomes float32.

    Returns:
        The dataset, with the same identity: the values follow from it and from what computed them.

    Raises:
        ValueError: The samples have no two texts, or the values another shape.
    """
    if not isinstance(dataset, ComparedRows) or np.shape(values) != (dataset.num_pairs, 2):
        raise ValueError(f"values {np.shape(values)} for {len(dataset)} samples of {type(dataset).__name__}")
    return replace(dataset, extras={**dataset.extras, name: np.asarray(values, np.float32)})


def cut_answers(examples: Examples, classes: Sequence[str | int], task: Task, longest: int, where: str) -> Cut:
    """Make pairs or labeled answers of examples, truncated to windows.

    Args:
        examples: The examples of rows of data.kind=preference.
        classes: What the labels of the examples are.
        task: The task, and whether pairs are compared.
        longest: Inputs in a window.
        where: Prefix of the settings of the source, for messages.

    Returns:
        For each pair its examples, for each labeled answer its example and the one with the other answer, and notes on
        what was left out.

    Raises:
        DataError: Pairs are compared, and the data has answers with a label.
    """
    is_one = {name: examples.labels == number for number, name in enumerate(classes)}
    none, counts = np.zeros(len(examples), bool), list[tuple[int, str, str]]()
    chosen, rejected, desirable, undesirable = (
        is_one.get(name, none) for name in (CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE)
    )
    for reason, (noun, words) in LEFT_OUT.items():
        counts.append((int(np.count_nonzero(is_one.get(reason, none))), noun, words))
    if task.samples == PAIRS:
        refuse_labeled(where, int(np.count_nonzero(desirable | undesirable)))
        before = np.maximum.accumulate(np.where(chosen, np.arange(len(examples)), -1))
        found, noun = np.stack([before[rejected], np.flatnonzero(rejected)], axis=1), "pair"
    else:
        found, noun = np.flatnonzero(chosen | rejected | desirable | undesirable)[:, None], "answer"
    usable, longer = _fits(examples, task, longest)
    kept = found[usable[found].all(axis=1)]
    num_truncated, num_unusable = int(np.count_nonzero(longer[kept].any(axis=1))), len(found) - len(kept)
    counts.append((num_unusable, noun, f" whose prompt fills the first {longest} tokens"))
    if task.samples != PAIRS:
        kept = _with_others(kept[:, 0], np.cumsum(chosen | desirable | undesirable))
    notes = [f"{format_count(count, noun)}{words} left out" for count, noun, words in counts if count]
    if number := int(np.count_nonzero(examples.first[kept[:, 0]] == 0)):
        notes.append(f"{format_count(number, noun)} without a prompt")
    return Cut(kept, num_truncated, sum(count for count, _, _ in counts), tuple(notes))


def _fits(examples: Examples, task: Task, longest: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return of which examples a part of the answer is in the window, and which are longer than it."""
    first, lengths = examples.first, examples.lengths
    if task.name == CLASSIFICATION:
        return (first >= 0) & (first < np.minimum(lengths, longest)), lengths > longest
    # A window has one token more than inputs, and its first is not predicted.
    return (first >= 0) & (np.maximum(first, 1) < np.minimum(lengths, longest + 1)), lengths > longest + 1


def _with_others(own: Ints, row_of: Ints) -> Ints:
    """Return examples `own` [num], each with one of the row before it [num, 2]; `row_of` has the row of an example."""
    if not len(own):
        return np.empty((0, 2), np.int64)
    _, starts, row, sizes = np.unique(row_of[own], return_index=True, return_inverse=True, return_counts=True)
    within = np.arange(len(own)) - starts[row]
    before = row - 1  # -1 is the last row
    return np.stack([own, own[starts[before] + np.minimum(within, sizes[before] - 1)]], axis=1)


def preference_samples(
    examples: Examples, kept: Ints, sequence_length: int, classes: Sequence[str | int], task: Task
) -> ComparedRows:
    """Make samples of what `cut_answers` kept."""
    if task.samples != PAIRS:
        good = [number for number, name in enumerate(classes) if name in (CHOSEN, DESIRABLE)]
        values = np.isin(examples.labels[kept[:, 0]], good).astype(np.float32)
        return LabeledAnswers(examples, kept, sequence_length, extras={DESIRABLE_VALUE: values})
    margins = examples.margins
    extras = {MARGIN: margins[kept[:, 1]].astype(np.float32)} if len(margins) else {}
    if task.name == CLASSIFICATION:
        return RewardRows(examples, kept, sequence_length, extras=extras, padding=task.padding)
    return PairedRows(examples, kept, sequence_length, extras=extras)
