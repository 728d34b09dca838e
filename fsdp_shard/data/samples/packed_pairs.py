"""Packs several pairs into one window, each as prompt, chosen and rejected answer, so a prompt is computed only once.

The rejected answer attends to the prompt and to itself, but not to the chosen answer in between, and its positions
continue from the prompt. `models.shared_prompt_masks` creates the masks, and `models.check_shared_prompts` rejects
models that do not support them.

The last token of a prompt predicts the first token of both answers, so each answer begins with a copy of it, which
gives every token one label. Pairs are never truncated: a pair that is longer than a window is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import (
    CHOSEN_PART,
    IGNORE_INDEX,
    NUM_PARTS,
    PROMPT_PART,
    REJECTED_PART,
    Floats,
    Ints,
    Sample,
    pad,
)
from fsdp_shard.data.samples.packing import ORDER, packed_windows
from fsdp_shard.data.samples.preferences import ComparedRows
from fsdp_shard.data.samples.rows import Cut, SkippedCount, next_labels
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.utils import format_count

_PAIRS_AT_ONCE = 1024  # pairs whose tokens are in memory at a time


@dataclass(frozen=True)
class PackedCompared(ComparedRows):
    """Samples of several text pairs: sample i consists of the pairs `kept[starts[i] : starts[i + 1]]`.

    Attributes:
        extras: Additional values of each pair by name, float32 [num_pairs] or [num_pairs, 2].
        starts: First pair of each sample, followed by the number of pairs [num_samples + 1].
    """

    starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def slice(self, first: int, last: int) -> Self:
        begin, end = int(self.starts[first]), int(self.starts[last])
        return replace(
            self,
            kept=self.kept[begin:end],
            extras={name: values[begin:end] for name, values in self.extras.items()},
            starts=self.starts[first : last + 1] - begin,
            part=f"{self.part}+{first}",
        )

    def pairs_of(self, index: int | None) -> range:
        """Return the numbers of a sample's pairs; none for None."""
        return range(0) if index is None else range(int(self.starts[index]), int(self.starts[index + 1]))

    def extras_of(self, index: int | None) -> dict[str, Floats]:
        pairs = self.pairs_of(index)
        return {name: values[pairs.start : pairs.stop] for name, values in self.extras.items()}


@dataclass(frozen=True)
class PackedPairs(PackedCompared):
    """Several pairs per window, each with one shared prompt.

    Attributes:
        shared: Number of tokens shared by both answers of each pair [num_pairs].
        padding: The padding token of a reward model, which reads the last other token of a text; None if answer tokens
            are predicted.
    """

    shared: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    padding: int | None = None

    @classmethod
    def pack(cls, rows: ComparedRows, shared: Ints, padding: int | None) -> Self:
        """Pack the pairs of `rows` by best fit, computing `shared` [num_pairs] tokens once."""
        lengths = pair_lengths(rows.examples, rows.kept, shared, is_scored=padding is not None)
        order, starts = packed_windows(lengths, rows.sequence_length)
        extras = {name: values[order] for name, values in rows.extras.items()}
        where = (rows.examples, rows.kept[order], rows.sequence_length, "")
        return cls(*where, extras, starts, shared[order], padding)

    @property
    def identity(self) -> str:
        pairs = f"{self.examples.name}:{len(self.kept)}/{self.sequence_length}"
        return f"packed-pairs-{ORDER}{self.part}:{len(self)}:{self.padding}:{pairs}"

    @property
    def summary(self) -> str:
        num_tokens = int(pair_lengths(self.examples, self.kept, self.shared, is_scored=self.padding is not None).sum())
        full = num_tokens / (len(self) * self.sequence_length)
        num_apart = num_tokens + int(self.shared.sum())
        windows = f"{format_count(len(self), 'window')} of {self.sequence_length} ({full:.1%} full)"
        pairs = format_count(len(self.kept), "pair")
        return (
            f"{pairs} packed into {windows}, of {num_tokens:,} tokens with one prompt a pair instead of {num_apart:,}"
        )

    def slice(self, first: int, last: int) -> Self:
        return replace(super().slice(first, last), shared=self.shared[self.starts[first] : self.starts[last]])

    def _sample(self, index: int | None, epoch: int) -> Sample:
        """Concatenate pairs; without any, the sample is only padding, which attends to itself."""
        length, end = self.sequence_length, 0
        ids, labels = pad([], length, self.padding or 0), pad([], length, IGNORE_INDEX)
        positions, segments = pad([], length), pad([], length)
        for number, pair in enumerate(self.pairs_of(index)):
            num_shared = int(self.shared[pair])
            chosen, rejected = (self._inputs_and_labels(int(example)) for example in self.kept[pair])
            prompt = tuple(array[:num_shared] for array in chosen)
            for part, first, (inputs, targets) in (
                (PROMPT_PART, 0, prompt),
                (CHOSEN_PART, num_shared, tuple(array[num_shared:] for array in chosen)),
                (REJECTED_PART, num_shared, tuple(array[num_shared:] for array in rejected)),
            ):
                span = slice(end, end := end + len(inputs))
                ids[span], labels[span], segments[span] = inputs, targets, NUM_PARTS * number + part
                positions[span] = np.arange(first, first + len(inputs))
        positions[end:] = np.arange(length - end)
        extras = self.extras_of(index)
        return Sample({"input_ids": ids, "position_ids": positions}, labels, extras=extras, segments=segments)

    def _inputs_and_labels(self, example: int) -> tuple[Ints, Ints]:
        """Return the inputs [length] of a prompt with its answer, and the labels.

        For a reward model, the label of the token whose score is used is 0, and the others are ignored.
        """
        tokens, predicted = self.examples.tokens_of(example)
        if self.padding is None:
            return next_labels(tokens, predicted, len(tokens))
        labels = pad([], len(tokens), IGNORE_INDEX)
        labels[read_token(tokens, self.padding)] = 0
        return tokens.astype(np.int64), labels


def read_token(tokens: npt.NDArray[Any], padding: int) -> int:
    """Return the position of the token whose score is used: the last one that is not padding, as in models."""
    found = np.flatnonzero(tokens != padding)
    return int(found[-1]) if len(found) else 0


def pair_lengths(examples: Examples, pairs: Ints, shared: Ints, *, is_scored: bool) -> Ints:
    """Return the lengths of pairs [num_pairs, 2] in a window, counting `shared` [num_pairs] tokens once."""
    inputs = examples.lengths[pairs] - (0 if is_scored else 1)  # the last token is only predicted
    return np.asarray(inputs.sum(axis=1) - shared, np.int64)


def fitting_pairs(cut: Cut, examples: Examples, longest: int, padding: int | None) -> Cut:
    """Find the tokens that the answers of each pair share, and skip pairs that are longer than a window.

    Args:
        cut: The pairs, in the order of the examples.
        examples: The examples.
        longest: Number of inputs in a window.
        padding: The padding token of a reward model, None for a model whose answers are predicted.
    """
    parts = [cut.kept[first : first + _PAIRS_AT_ONCE] for first in range(0, len(cut.kept), _PAIRS_AT_ONCE)]
    shared = np.concatenate([np.empty(0, np.int64), *(_shared_tokens(examples, part, padding) for part in parts)])
    fits = pair_lengths(examples, cut.kept, shared, is_scored=padding is not None) <= longest
    num_long = int(np.count_nonzero(~fits))
    reason = SkippedCount(num_long, "pair", f" longer than a window of {longest}")
    return replace(
        cut,
        kept=cut.kept[fits],
        num_truncated=0,
        num_dropped=cut.num_dropped + num_long,
        num_beyond=cut.num_beyond + num_long,
        skipped=(*cut.skipped, reason) if num_long else cut.skipped,
        shared=shared[fits],
    )


def _shared_tokens(examples: Examples, pairs: Ints, padding: int | None) -> Ints:
    """Return the length of the common beginning of each pair [num_pairs, 2], without the prompt's last token.

    It also excludes the token that a reward model reads, if an answer is only padding.
    """
    most = examples.first[pairs].min(axis=1)
    starts = examples.ends[pairs] - examples.lengths[pairs]
    offset, stop = int(starts.min()), int(examples.ends[pairs].max())
    tokens = np.asarray(examples.tokens[offset:stop])
    if padding is not None:
        last = np.maximum.accumulate(np.where(tokens != padding, np.arange(len(tokens)), 0))
        read = np.maximum(last[examples.ends[pairs] - offset - 1] - (starts - offset), 0)
        most = np.minimum(most, read.min(axis=1) + 1)
    most = np.maximum(most, 1)
    # The tokens before the answers, for all pairs in order.
    begins = np.cumsum(most) - most
    within = np.arange(int(most.sum())) - np.repeat(begins, most)
    one, other = (tokens[np.repeat(starts[:, side] - offset, most) + within] for side in (0, 1))
    first_difference = np.minimum.reduceat(np.where(one != other, within, np.repeat(most, most)), begins)
    return np.asarray(np.maximum(first_difference - 1, 0), np.int64)
