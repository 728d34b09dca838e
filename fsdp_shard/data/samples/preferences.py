"""Compared answers as samples of two texts each, which become neighboring rows of a batch.

A pair consists of the chosen and the rejected answer. A labeled answer comes with a second text, its prompt with the
answer of another sample, from which KTO (Ethayarajh et al., 2024) estimates how far the model is from the reference
model. As in TRL, the other sample is the previous one, and the last one for the first sample. If a row has several
answers, it is the answer at the same position in the previous row, as another answer to the same prompt would not be a
mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.kinds.kind import PAIRS
from fsdp_shard.data.kinds.preference_formats import (
    CHOSEN,
    DESIRABLE,
    REJECTED,
    SKIP_REASONS,
    UNDESIRABLE,
    refuse_labeled,
)
from fsdp_shard.data.samples.batch import IGNORE_INDEX, Floats, Ints, Sample, pad
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.samples.rows import Cut, RowDataset, SkippedCount, cut_text, next_labels, width_of
from fsdp_shard.data.task import Task
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import format_count

DESIRABLE_VALUE, MARGIN = "desirable", "margin"  # names of extras
# Reasons for skipping items because of the window, with its length.
PROMPT_FILLS, EQUAL_WHEN_CUT = (
    " whose prompt fills the first {} tokens",
    " whose answers are equal in the first {} tokens",
)
NO_OTHER = " without another prompt's answer to compare with"


@dataclass(frozen=True)
class ComparedRows(RowDataset):
    """Samples of two texts, the examples `kept` [num_samples, 2].

    Attributes:
        extras: Additional values by name, float32 [num_samples], or [num_samples, 2] with one for each text.
    """

    extras: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def num_pairs(self) -> int:
        """Number of values in `extras`: one per sample, unless samples have several pairs."""
        return len(self.kept)

    def pairs_of(self, index: int) -> range:
        """Return the positions of a sample's values in `extras`."""
        return range(index, index + 1)

    @property
    def summary(self) -> str:
        return f"{format_count(len(self), 'pair')} of up to {self.sequence_length} tokens each"

    def slice(self, first: int, last: int) -> Self:
        return replace(
            super().slice(first, last), extras={name: values[first:last] for name, values in self.extras.items()}
        )

    def extras_of(self, index: int | None) -> dict[str, Floats]:
        """Return the extra values of a sample; zeros for None."""
        return {
            name: np.zeros(values.shape[1:], np.float32) if index is None else np.asarray(values[index])
            for name, values in self.extras.items()
        }


class PairedRows(ComparedRows):
    """The chosen and the rejected answer, each after its prompt; their tokens are predicted from those before them."""

    def answers_of(self, index: int) -> list[tuple[Ints, npt.NDArray[Any]]]:
        """Return the tokens of both texts, and which of them are predicted."""
        return [self.examples.tokens_of(int(example)) for example in self.kept[index]]

    def _sample(self, index: int | None, epoch: int) -> Sample:
        empty = np.empty(0, np.int64)
        rows = [(empty, empty)] * 2
        if index is not None:
            rows = [next_labels(*answer, self.sequence_length) for answer in self.answers_of(index)]
        width = max(width_of(len(inputs), self.sequence_length) for inputs, _ in rows)
        ids = np.stack([pad(inputs, width) for inputs, _ in rows])
        labels = np.stack([pad(labels, width, IGNORE_INDEX) for _, labels in rows])
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
        # A filler, without a label, still has texts: some models look for the token that ends them.
        found = [self.examples.tokens_of(int(example))[0].astype(np.int64) for example in self.kept[index or 0]]
        texts = [self.text_inputs(ids, self.padding) for ids in found]
        width = max(len(text["input_ids"]) for text in texts)
        inputs = {
            name: np.stack([pad(text[name], width, self.padding if name == "input_ids" else 0) for text in texts])
            for name in texts[0]
        }
        labels = np.full(2, IGNORE_INDEX if index is None else 0, np.int64)
        return Sample(inputs, labels, self.padding, extras=self.extras_of(index))


def with_extras(dataset: SourceDataset, name: str, values: npt.NDArray[Any]) -> SourceDataset:
    """Return compared samples with additional values, such as log-probabilities under a reference model.

    Args:
        dataset: The samples.
        name: Name of the values in `Sample.extras` and `Batch.extras`.
        values: A value for each text of each sample, or of each pair in it, [num_pairs, 2]; converted to float32.

    Returns:
        The dataset, with the same identity: the dataset and the model that computed the values determine them.

    Raises:
        ValueError: The samples do not have two texts, or the values have another shape.
    """
    if not isinstance(dataset, ComparedRows) or np.shape(values) != (dataset.num_pairs, 2):
        raise ValueError(f"values {np.shape(values)} for {len(dataset)} samples of {type(dataset).__name__}")
    return replace(dataset, extras={**dataset.extras, name: np.asarray(values, np.float32)})


def cut_answers(
    examples: Examples, classes: Sequence[str | int], task: Task, longest: int, where: str, *, keeps_whole: bool
) -> Cut:
    """Combine examples into pairs or labeled answers, truncated to windows.

    Args:
        examples: The examples of rows of data.kind=preference.
        classes: The values of the examples' labels.
        task: The task, and whether pairs are compared.
        longest: Number of inputs in a window.
        where: Prefix of the settings of the source, for messages.
        keeps_whole: Whether pairs will be packed, and so never truncated.

    Returns:
        For each pair its examples, for each labeled answer its example and the one with the other answer, and the
        skipped items.

    Raises:
        DataError: Pairs are required, but the data has labeled answers.
    """
    is_one = {name: examples.labels == number for number, name in enumerate(classes)}
    none = np.zeros(len(examples), bool)
    chosen, rejected, desirable, undesirable = (
        is_one.get(name, none) for name in (CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE)
    )
    counts = [
        SkippedCount(int(np.count_nonzero(is_one.get(reason, none))), *words) for reason, words in SKIP_REASONS.items()
    ]
    num_unlike = sum(one.number for one in counts)
    usable, longer = fits(examples, task, longest)
    pairs = np.stack([chosen_before(chosen)[rejected], np.flatnonzero(rejected)], axis=1)
    are_usable = usable[pairs].all(axis=1)
    are_equal = are_usable & (not keeps_whole)
    are_equal[are_equal] = _equal_when_cut(examples, pairs[are_equal], task, longest)
    if task.samples == PAIRS:
        refuse_labeled(where, int(np.count_nonzero(desirable | undesirable)))
        noun, kept, num_filled = "pair", pairs[are_usable & ~are_equal], int(np.count_nonzero(~are_usable))
    else:
        answers = np.flatnonzero(chosen | rejected | desirable | undesirable)
        noun, num_filled = "answer", int(np.count_nonzero(~usable[answers]))
        # The chosen answer is skipped together with the last answer with which it is compared.
        left_out = [pairs[are_equal, 1], np.setdiff1d(pairs[are_equal, 0], pairs[~are_equal, 0])]
        kept = np.setdiff1d(answers[usable[answers]], np.concatenate(left_out))[:, None]
    counts.append(SkippedCount(num_filled, noun, PROMPT_FILLS.format(longest)))
    counts.append(SkippedCount(int(np.count_nonzero(are_equal)), "pair", EQUAL_WHEN_CUT.format(longest)))
    if task.samples != PAIRS:
        row_of = np.cumsum(chosen | desirable | undesirable)
        if len(np.unique(row_of[kept])) == 1:  # as of a last block of a stream with one row
            counts.append(SkippedCount(len(kept), noun, NO_OTHER))
            num_unlike, kept = num_unlike + len(kept), kept[:0]
    num_truncated, num_dropped = int(np.count_nonzero(longer[kept].any(axis=1))), sum(one.number for one in counts)
    if task.samples != PAIRS:
        kept = _with_others(kept[:, 0], row_of)
    reasons = tuple(one for one in counts if one.number)
    number = int(np.count_nonzero(examples.first[kept[:, 0]] == 0))
    notes = (f"{format_count(number, noun)} without a prompt",) if number else ()
    return Cut(kept, num_truncated, num_dropped, num_dropped - num_unlike, noun, reasons, notes)


def chosen_before(chosen: npt.NDArray[np.bool_]) -> Ints:
    """Return the last `chosen` example up to each example, -1 without one; all [num_examples]."""
    return np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), -1))


def fits(examples: Examples, task: Task, longest: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which examples have a part of the answer in the window, and which are longer than the window."""
    first, lengths = examples.first, examples.lengths
    if task.name == SEQUENCE_CLASSIFICATION:
        return (first >= 0) & (first < np.minimum(lengths, longest)), lengths > longest
    # A window has one more token than inputs, and its first token is not predicted.
    return (first >= 0) & (np.maximum(first, 1) < np.minimum(lengths, longest + 1)), lengths > longest + 1


def _equal_when_cut(examples: Examples, pairs: Ints, task: Task, longest: int) -> npt.NDArray[np.bool_]:
    """Return which pairs [num_pairs, 2] are equal after truncation, so that their loss is constant.

    The gradient of such a loss is rounding noise, which optimizers such as Adam turn into a full step.
    """
    is_scored = task.name == SEQUENCE_CLASSIFICATION
    longest, keeps_last = (longest, examples.keeps_last) if is_scored else (longest + 1, False)
    lengths, found = examples.lengths[pairs], np.zeros(len(pairs), bool)
    # Answers that are equal without truncation were skipped earlier.
    for number in np.flatnonzero((lengths >= longest).all(axis=1) & (lengths > longest).any(axis=1)):
        one, other = (cut_text(examples.tokens_of(int(each))[0], longest, keeps_last) for each in pairs[number])
        found[number] = np.array_equal(one, other)
    return found


def _with_others(own: Ints, row_of: Ints) -> Ints:
    """Return examples `own` [num], each with one of the previous row [num, 2]; `row_of` maps examples to rows."""
    if not len(own):
        return np.empty((0, 2), np.int64)
    _, starts, row, sizes = np.unique(row_of[own], return_index=True, return_inverse=True, return_counts=True)
    within = np.arange(len(own)) - starts[row]
    before = row - 1  # -1 is the last row
    return np.stack([own, own[starts[before] + np.minimum(within, sizes[before] - 1)]], axis=1)


def preference_samples(
    examples: Examples, kept: Ints, sequence_length: int, classes: Sequence[str | int], task: Task
) -> ComparedRows:
    """Create samples from a result of `cut_answers`."""
    if task.samples != PAIRS:
        good = [number for number, name in enumerate(classes) if name in (CHOSEN, DESIRABLE)]
        values = np.isin(examples.labels[kept[:, 0]], good).astype(np.float32)
        return LabeledAnswers(examples, kept, sequence_length, extras={DESIRABLE_VALUE: values})
    margins = examples.margins
    extras = {MARGIN: margins[kept[:, 1]].astype(np.float32)} if len(margins) else {}
    if task.name == SEQUENCE_CLASSIFICATION:
        return RewardRows(examples, kept, sequence_length, extras=extras, padding=task.padding)
    return PairedRows(examples, kept, sequence_length, extras=extras)
