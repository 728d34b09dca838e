"""Samples, and their collation into batches."""

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

IGNORE_INDEX = -100  # the label that the losses of torch and transformers ignore
# Segment numbers of tokens in packed pairs: 0 is padding; 3k + 1, 3k + 2 and 3k + 3 are the prompt, the chosen and the
# rejected answer of the sample's pair k. Answers in separate rows include their prompts.
PROMPT_PART, CHOSEN_PART, REJECTED_PART, NUM_PARTS = 1, 2, 3, 3
NO_WINDOW = -1  # the index of a sample in which every label is ignored


@dataclass(frozen=True)
class Sample:
    """One sample of a `Batch`: its arrays, without their first dimension.

    A sample of two compared texts has arrays with two rows, which become rows 2i and 2i + 1 of a batch.

    Attributes:
        inputs: Inputs of the model, except those of a decoder; [length], or [2, length].
        labels: Labels.
        padding: The padding token, which fills `input_ids` up to the longest sample of a batch.
        decoder_start: The token before the labels in the decoder's input, for models with a decoder.
        extras: Additional values by name, float32 [] or [2]; for packed pairs [num_pairs] or [num_pairs, 2].
        token_values: Values of each trained label, by name, [num_predictions, ...].
        segments: For packed pairs, the segment of each token (`CHOSEN_PART`), int64 [length]; [2, length] if the
            answers of pairs are in separate rows.
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
        """Its rows as samples, with the `extras` and `token_values` of the whole; itself unless it has two rows."""
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
        inputs: Inputs of the model by argument name, int64 [num_samples, length]; [2 * num_samples, length] for samples
            with two rows.
        labels: Labels, int64, with the shape of the model's logits without their last dimension. Next-token labels are
            already shifted.
        extras: Additional values of each sample by name, float32 [num_samples], or [num_samples, 2] with one for each
            row; for packed pairs, the values of all pairs in order.
        token_values: Values of each trained label, by name, [num_predictions, ...], in the order of the flattened
            labels.
        segments: For packed pairs, as in `Sample`, with the shape of `input_ids`.
        rows_per_sample: Number of rows per sample, 1 or 2.
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
        """Number of trained labels."""
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))

    @property
    def answer_sizes(self) -> Ints:
        """Number of trained labels in both answers of each pair, [num_pairs, 2]; 0 for fillers."""
        counted = self.labels != IGNORE_INDEX
        if self.segments is None:
            return np.asarray(counted.reshape(len(counted), -1).sum(axis=1).reshape(-1, 2), np.int64)
        num_pairs = self.segments.reshape(len(counted) // self.rows_per_sample, -1).max(axis=1) // NUM_PARTS
        firsts = np.repeat(np.cumsum(num_pairs) - num_pairs, self.rows_per_sample)
        pairs, parts = np.divmod(self.segments[counted] - 1, NUM_PARTS)
        sizes = np.zeros((int(num_pairs.sum()), 2), np.int64)
        np.add.at(sizes, (firsts[np.nonzero(counted)[0]] + pairs, parts - (CHOSEN_PART - 1)), 1)
        return sizes


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples for one model, which all have the same inputs.

    Shorter samples are padded at the end, as some models look for the last token that is not padding.
    """
    first, inputs, rows = samples[0], dict[str, Ints](), list(chain.from_iterable(sample.rows for sample in samples))
    for name in first.inputs:
        padding = first.padding if name == "input_ids" else 0
        inputs[name] = _stack([row.inputs[name] for row in rows], padding)
    labels = _stack([row.labels for row in rows], IGNORE_INDEX)
    segments = None if first.segments is None else _stack([row.segments for row in rows if row.segments is not None], 0)
    # A sample of packed pairs has values for several pairs.
    join: Callable[..., Floats] = np.stack if segments is None else np.concatenate
    extras = {name: join([sample.extras[name] for sample in samples]) for name in first.extras}
    values = {name: np.concatenate([sample.token_values[name] for sample in samples]) for name in first.token_values}
    if first.decoder_start is not None:
        before = np.where(labels == IGNORE_INDEX, first.decoder_start, labels)[:, :-1]
        inputs["decoder_input_ids"] = np.insert(before, 0, first.decoder_start, axis=1)
    return Batch(inputs, labels, extras, values, segments, len(rows) // len(samples))


def _stack(arrays: Sequence[Ints], padding: int) -> Ints:
    if arrays[0].ndim == 0:
        return np.stack(arrays)
    longest = max(len(array) for array in arrays)
    return np.stack([pad(array, longest, padding) for array in arrays])


def pad(values: Indices, length: int, padding: int = 0) -> Ints:
    """Return `values` [num_values] as int64 [length], filled up with `padding`."""
    result = np.full(length, padding, np.int64)
    result[: len(values)] = values
    return result


def with_attention_mask(ids: Indices, length: int, padding: int = 0) -> dict[str, Ints]:
    """Return the inputs [length] of a model for the tokens `ids` [num_tokens], with an attention mask."""
    mask = pad(np.ones(len(ids), np.int64), length)
    return {"input_ids": pad(ids, length, padding), "attention_mask": mask}
