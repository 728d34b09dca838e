"""Samples of models that are not causal: a source and a target, a text and its class. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.padded import Cut, RowDataset, cut_rows, stack
from fsdp_shard.data.samples.windows import MASKED, Batch
from fsdp_shard.data.tokenized.example_cache import Examples


def cut_pairs(examples: Examples, sequence_length: int, target_length: int) -> Cut:
    """Examples with a source and a target; those of which either is cut are counted."""
    targets = examples.lengths - examples.first
    longer = (examples.first > sequence_length) | (targets > target_length)
    return cut_rows((examples.first > 0) & (targets > 0), longer)


def cut_texts(examples: Examples, sequence_length: int) -> Cut:
    """Examples that are one text each."""
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

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        sources, targets = [], []
        for index in self._chosen(indices):
            if index is None:
                sources.append(np.zeros(1, np.int64))  # one token, or attention would have nothing to look at
                targets.append(np.full(1, MASKED, np.int64))
                continue
            ids, split = self.examples.tokens_of(index)[0].astype(np.int64), int(self.examples.first[index])
            sources.append(shortened(ids[:split], self.sequence_length, self.examples.keeps_last))
            targets.append(ids[split:][: self.target_length])
        labels = stack(targets, MASKED, self.target_length)
        starts = np.full((len(labels), 1), self.decoder_start)
        shifted = np.concatenate([starts, np.where(labels == MASKED, self.decoder_start, labels)[:, :-1]], axis=1)
        input_ids, attention_mask = padded(sources, self.sequence_length, self.padding)
        return Batch(input_ids, labels, {"attention_mask": attention_mask, "decoder_input_ids": shifted}, self.padding)


@dataclass(frozen=True)
class LabeledRows(RowDataset):
    """A text a sample, with the number of its class."""

    numbers: tuple[int, ...] = ()
    padding: int = 0

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        texts, labels = [], []
        for index in self._chosen(indices):
            # Where nothing is to count there is a text all the same: some models look for the token that ends it.
            text = int(self.kept[0]) if index is None else index
            ids = self.examples.tokens_of(text)[0].astype(np.int64)
            texts.append(shortened(ids, self.sequence_length, self.examples.keeps_last))
            labels.append(MASKED if index is None else self.numbers[int(self.examples.labels[index])])
        input_ids, attention_mask = padded(texts, self.sequence_length, self.padding)
        return Batch(input_ids, np.asarray(labels, np.int64), {"attention_mask": attention_mask}, self.padding)


def padded(
    rows: Sequence[npt.NDArray[np.int64]], longest: int, padding: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(tokens, attention mask) of `rows`, stacked."""
    return stack(rows, padding, longest), stack([np.ones(len(row), np.int64) for row in rows], 0, longest)


def shortened(ids: npt.NDArray[np.int64], longest: int, keeps_last: bool) -> npt.NDArray[np.int64]:
    """`ids` cut to `longest`; with `keeps_last` the token that ends the text stays its last."""
    if len(ids) <= longest:
        return ids
    return np.concatenate([ids[: longest - 1], ids[-1:]]) if keeps_last else ids[:longest]
