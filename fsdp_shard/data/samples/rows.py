"""Examples as samples, one per window: truncated if they are too long, padded if they are short.

There are three shapes: text with predicted tokens, a source and a target, and a text and its class.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import IGNORE_INDEX, Ints, Sample, pad, with_attention_mask
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.utils import format_count

# Batches are padded to a multiple of this: kernels are faster, and there are fewer shapes to compile for.
_WIDTH_UNIT = 8


class SkippedCount(NamedTuple):
    """How many compared pairs or answers are left out, and why: 2, `pair` and ` with equal answers`."""

    number: int
    noun: str
    words: str

    def __str__(self) -> str:
        return f"{format_count(self.number, self.noun)}{self.words}"


@dataclass(frozen=True)
class Cut:
    """The examples that truncation leaves.

    Attributes:
        kept: The numbers of these examples [num_kept], or of both answers of pairs [num_kept, 2].
        num_truncated: Those of `kept` that were longer.
        num_dropped: Examples with nothing left to learn.
        num_beyond: Those of `num_dropped` that a larger window would keep.
        what: The unit of the counts: rows, or pairs or answers that are compared.
        skipped: How many compared pairs or answers were dropped, and why.
        notes: Further notes to print.
        shared: For pairs to pack, the number of tokens that both answers share [num_kept].
    """

    kept: Ints
    num_truncated: int
    num_dropped: int
    num_beyond: int = 0
    what: str = "row"
    skipped: tuple[SkippedCount, ...] = ()
    notes: tuple[str, ...] = ()
    shared: Ints | None = None


@dataclass(frozen=True)
class RowDataset(SourceDataset):
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

    def tokens_of(self, index: int) -> Ints:
        """Return all tokens of an example."""
        return self.examples.tokens_of(int(self.kept[index]))[0].astype(np.int64)

    def text_inputs(self, ids: Ints, padding: int) -> dict[str, Ints]:
        """Return the inputs for a text [num_tokens]. A truncated text keeps its end token as the last one."""
        longest = self.sequence_length
        ids = cut_text(ids, longest, self.examples.keeps_last)
        return with_attention_mask(ids, width_of(len(ids), longest), padding)


def cut_text(ids: npt.NDArray[Any], longest: int, keeps_last: bool) -> npt.NDArray[Any]:
    """Return at most `longest` tokens of a text, including its last one if `keeps_last`."""
    if len(ids) <= longest:
        return ids
    return np.concatenate([ids[: longest - 1], ids[-1:]]) if keeps_last else ids[:longest]


def width_of(num_tokens: int, longest: int) -> int:
    """Return the length of a sample of `num_tokens`; `longest` is the length of the longest possible sample."""
    num_tokens = max(1, num_tokens)
    return min(-(-num_tokens // _WIDTH_UNIT) * _WIDTH_UNIT, max(num_tokens, longest))


def next_labels(tokens: npt.NDArray[Any], predicted: npt.NDArray[Any], longest: int) -> tuple[Ints, Ints]:
    """Return inputs and labels, both [at most longest]: labels are the next tokens, if `predicted`, or IGNORE_INDEX."""
    ids = tokens[: longest + 1].astype(np.int64)
    return ids[:-1], np.where(predicted[1 : len(ids)] != 0, ids[1:], IGNORE_INDEX)


class CausalRows(RowDataset):
    """One example per window; the tokens that it marks are predicted from the preceding ones."""

    @property
    def summary(self) -> str:
        return f"each in a window of up to {self.sequence_length}"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        inputs = labels = np.empty(0, np.int64)
        if index is not None:
            inputs, labels = next_labels(*self.examples.tokens_of(int(self.kept[index])), self.sequence_length)
        width = width_of(len(inputs), self.sequence_length)
        return Sample({"input_ids": pad(inputs, width)}, pad(labels, width, IGNORE_INDEX))


@dataclass(frozen=True)
class Seq2SeqRows(RowDataset):
    """The encoder reads the source; the decoder predicts each token of the target from the preceding ones."""

    target_length: int = 0
    decoder_start: int = 0
    padding: int = 0

    @property
    def identity(self) -> str:
        return f"{super().identity}/{self.target_length}"

    @property
    def summary(self) -> str:
        return f"sources of up to {self.sequence_length} and targets of up to {self.target_length}"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        source, target = np.zeros(1, np.int64), np.empty(0, np.int64)  # attention needs at least one token
        if index is not None:
            source, target = np.split(self.tokens_of(index), [self.examples.first[self.kept[index]]])
        target = target[: self.target_length]
        labels = pad(target, width_of(len(target), self.target_length), IGNORE_INDEX)
        return Sample(self.text_inputs(source, self.padding), labels, self.padding, self.decoder_start)


@dataclass(frozen=True)
class LabeledRows(RowDataset):
    """One text per sample, with the index of its class; `numbers` are the model's indices of the classes."""

    numbers: tuple[int, ...] = ()
    padding: int = 0

    @property
    def summary(self) -> str:
        return f"{len(self.numbers)} classes"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        label = IGNORE_INDEX if index is None else self.numbers[self.examples.labels[self.kept[index]]]
        # A sample without a label still needs a text: some models look for its end token.
        inputs = self.text_inputs(self.tokens_of(index or 0), self.padding)
        return Sample(inputs, np.asarray(label, np.int64), self.padding)
