"""Packs several labeled answers into a window, and their prompts with answers to other prompts into a second window.

Text k has the same prompt in both windows. An objective runs the first window with gradients and the second without.
Positions restart at each text, which separates the texts as in `packing`. Texts are truncated as without packing, so
losses are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from fsdp_shard.data.samples.batch import CHOSEN_PART, REJECTED_PART, Ints, Sample
from fsdp_shard.data.samples.packed_pairs import PackedCompared
from fsdp_shard.data.samples.packing import ORDER, join_documents, packed_windows
from fsdp_shard.data.samples.preferences import ComparedRows, LabeledAnswers
from fsdp_shard.data.samples.rows import next_labels
from fsdp_shard.utils import format_count


@dataclass(frozen=True)
class PackedLabeledAnswers(PackedCompared, LabeledAnswers):
    """Samples of two windows: one with answers, and one with their prompts and other answers."""

    @classmethod
    def pack(cls, rows: ComparedRows) -> Self:
        """Pack the answers of `rows` by best fit, so that they fit into both windows."""
        order, starts = packed_windows(_input_lengths(rows).max(axis=1), rows.sequence_length)
        extras = {name: values[order] for name, values in rows.extras.items()}
        return cls(rows.examples, rows.kept[order], rows.sequence_length, "", extras, starts)

    @property
    def identity(self) -> str:
        answers = f"{self.examples.name}:{len(self.kept)}/{self.sequence_length}"
        return f"packed-answers-{ORDER}{self.part}:{len(self)}:{answers}"

    @property
    def summary(self) -> str:
        full = int(_input_lengths(self)[:, 0].sum()) / (len(self) * self.sequence_length)
        windows = f"{format_count(len(self), 'window')} of {self.sequence_length} ({full:.1%} full)"
        return f"{format_count(len(self.kept), 'answer')} packed into {windows}, each with one of other answers"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        answers, length = [self.answers_of(pair) for pair in self.pairs_of(index)], self.sequence_length
        rows = [
            join_documents((next_labels(*answer[row], length) for answer in answers), length, part)
            for row, part in enumerate((CHOSEN_PART, REJECTED_PART))
        ]
        inputs = {name: np.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
        labels = np.stack([row.labels for row in rows])
        segments = np.stack([row.segments for row in rows if row.segments is not None])
        return Sample(inputs, labels, extras=self.extras_of(index), segments=segments)


def _input_lengths(rows: ComparedRows) -> Ints:
    """Return the number of inputs for each answer, and for its prompt with the other answer, [num_answers, 2]."""
    first, lengths = rows.examples.first, rows.examples.lengths
    own, other = rows.kept.T
    inputs = np.stack([lengths[own], first[own] + lengths[other] - first[other]], axis=1) - 1
    return np.asarray(np.minimum(inputs, rows.sequence_length), np.int64)
