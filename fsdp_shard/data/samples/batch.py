"""Samples, and how they are stacked to batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Indices: TypeAlias = Sequence[int] | Ints
Floats: TypeAlias = npt.NDArray[np.float32]
Values: TypeAlias = npt.NDArray[Any]

MASKED = -100  # the label that the losses of torch and transformers ignore
# What a token of packed pairs belongs to, a segment, is a number: 0 is padding, and the prompt, the chosen and the
# rejected answer of pair k of its sample are 3k + 1, 3k + 2 and 3k + 3. Answers in rows of their own have their prompts
# in them.
PROMPT_PART, CHOSEN_PART, REJECTED_PART, NUM_PARTS = 1, 2, 3, 3
NO_WINDOW = -1  # the index of a sample in which every label is masked


@dataclass(frozen=True)
class Sample:
    """One sample of a `Batch`: its arrays without their first dimension.

    A sample of two texts that are compared has arrays of two rows, which become rows 2i and 2i + 1 of a batch.

    Attributes:
        inputs: Inputs of the model, but for those of a decoder; [length], or [2, length].
        labels: Labels.
        padding: The padding token, in which `input_ids` end where other samples of a batch are longer.
        decoder_start: The token before the labels in the input of a decoder, for models that have one.
        extras: Other values by name, float32 [] or [2]; of packed pairs [num_pairs] or [num_pairs, 2].
        token_values: Values of each label that is not masked, by name, [num_predictions, ...].
        segments: Of packed pairs, what each token belongs to (`CHOSEN_PART`), int64 [length]; [2, length] where the
            answers of pairs are in rows of their own.
    """

    inputs: Mapping[str, Ints]
    labels: Ints
    padding: int = 0
    decoder_start: int | None = None
    extras: Mapping[str, Floats] = field(default_factory=dict)
    token_values: Mapping[str, Values] = field(default_factory=dict)
    segments: Ints | None = None

    @property
    def rows(self) -> list[Sample]:
        """Its rows, each a sample without `extras`; itself unless it has two."""
        if self.inputs["input_ids"].ndim == 1:
            return [self]
        return [
            replace(
                self,
                inputs={name: array[row] for name, array in self.inputs.items()},
                labels=np.asarray(labels),
                segments=None if self.segments is None else self.segments[row],
            )
            for row, labels in enumerate(self.labels)
        ]


@dataclass(frozen=True)
class Batch:
    """Stacked samples.

    Attributes:
        inputs: Inputs of the model by the names of its arguments, int64 [num_samples, length]; [2 * num_samples,
            length] of samples with two rows.
        labels: Labels, int64, with the shape of the model's logits without their last dimension. Those of a next token
            are already shifted.
        extras: Other values of each sample by name, float32 [num_samples], or [num_samples, 2] with one for each row;
            of packed pairs those of one pair after the other.
        token_values: Values of each label that is not masked, by name, [num_predictions, ...], in the order of the flat
            labels.
        segments: Of packed pairs, as in `Sample`, with the shape of `input_ids`.
        rows_per_sample: Number of rows of each sample, 1 or 2.
    """

    inputs: Mapping[str, Ints]
    labels: Ints
    extras: Mapping[str, Floats] = field(default_factory=dict)
    token_values: Mapping[str, Values] = field(default_factory=dict)
    segments: Ints | None = None
    rows_per_sample: int = 1

    @property
    def input_ids(self) -> Ints:
        """Token ids, as in `inputs`."""
        return self.inputs["input_ids"]

    @property
    def num_predictions(self) -> int:
        """Number of labels that are not masked."""
        return int(np.count_nonzero(self.labels != MASKED))

    @property
    def answer_sizes(self) -> Ints:
        """Number of labels that are not masked of both answers of each pair, [num_pairs, 2]; 0 of one that fills up."""
        counted = self.labels != MASKED
        if self.segments is None:
            return np.asarray(counted.reshape(len(counted), -1).sum(axis=1).reshape(-1, 2), np.int64)
        num_pairs = self.segments.reshape(len(counted) // self.rows_per_sample, -1).max(axis=1) // NUM_PARTS
        firsts = np.repeat(np.cumsum(num_pairs) - num_pairs, self.rows_per_sample)
        pairs, parts = np.divmod(self.segments[counted] - 1, NUM_PARTS)
        sizes = np.zeros((int(num_pairs.sum()), 2), np.int64)
        np.add.at(sizes, (firsts[np.nonzero(counted)[0]] + pairs, parts - (CHOSEN_PART - 1)), 1)
        return sizes


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples of one model, which all have the same inputs.

    Shorter ones are padded at the end: some models look for the last token that is not padding.
    """
    first, inputs, rows = samples[0], dict[str, Ints](), list(chain.from_iterable(sample.rows for sample in samples))
    for name in first.inputs:
        padding = first.padding if name == "input_ids" else 0
        inputs[name] = _stack([row.inputs[name] for row in rows], padding)
    labels = _stack([row.labels for row in rows], MASKED)
    segments = None if first.segments is None else _stack([row.segments for row in rows if row.segments is not None], 0)
    # A sample of packed pairs has values of several.
    join: Callable[..., Floats] = np.stack if segments is None else np.concatenate
    extras = {name: join([sample.extras[name] for sample in samples]) for name in first.extras}
    values = {name: np.concatenate([sample.token_values[name] for sample in samples]) for name in first.token_values}
    if first.decoder_start is not None:
        before = np.where(labels == MASKED, first.decoder_start, labels)[:, :-1]
        inputs["decoder_input_ids"] = np.insert(before, 0, first.decoder_start, axis=1)
    return Batch(inputs, labels, extras, values, segments, len(rows) // len(samples))


def _stack(arrays: Sequence[Ints], padding: int) -> Ints:
    if arrays[0].ndim == 0:
        return np.stack(arrays)
    longest = max(len(array) for array in arrays)
    return np.stack([padded(array, longest, padding) for array in arrays])


def padded(values: Indices, length: int, padding: int = 0) -> Ints:
    """Return `values` [num_values] as int64 [length], which ends in `padding`."""
    result = np.full(length, padding, np.int64)
    result[: len(values)] = values
    return result


def attended(ids: Indices, length: int, padding: int = 0) -> dict[str, Ints]:
    """Return the inputs [length] of a model that takes the tokens `ids` [num_tokens] and an attention mask."""
    mask = padded(np.ones(len(ids), np.int64), length)
    return {"input_ids": padded(ids, length, padding), "attention_mask": mask}
