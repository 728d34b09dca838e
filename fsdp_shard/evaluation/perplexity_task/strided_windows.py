"""Overlapping windows over texts of any length: each token is scored in the first window that contains it.

With a stride, these are the windows of transformers' guide "Perplexity of fixed-length models". A window begins every
`stride` tokens, has up to `length` tokens, and predicts those that no earlier window contains, each from all preceding
tokens in its window. The first token of a window has none. So the first token of a text is not scored, and if `stride`
equals `length`, neither is that of any window.

Without a stride, windows of `length` tokens each predict the next token for every position, as in training. Neighbors
then overlap by one token, and only the first token of a text is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data import IGNORE_INDEX, Array, Ints, MapDataset, Sample, pad, with_attention_mask


def window_bounds(num_tokens: int, length: int, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first scored token) of the windows over a text.

    Args:
        num_tokens: Number of tokens in the text.
        length: Most tokens that a model reads at once.
        stride: Distance between window starts in tokens, at most `length`; None as in training.
    """
    longest, stride = (length + 1, length) if stride is None else (length, stride)
    scored = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + longest, num_tokens)
        yield begin, end, max(scored, begin + 1)
        scored = end
        if end == num_tokens:
            return


@dataclass(frozen=True)
class StridedWindows(MapDataset):
    """Windows of several texts stored one after the other in `tokens`.

    Attributes:
        tokens: Token ids of all texts [num_tokens].
        predicted: Whether each token is to be scored [num_tokens]; None for all.
        bounds: Start and end of each window in `tokens`, and the first token that it scores,
            int64 [num_windows, 3].
        text_of: The index of each window's text, int64 [num_windows].
        sequence_length: Most tokens that the model reads at once.
    """

    tokens: Array
    predicted: Array | None
    bounds: Ints
    text_of: Ints
    sequence_length: int

    @classmethod
    def over(cls, tokens: Array, predicted: Array | None, ends: Ints, length: int, stride: int | None) -> Self:
        """Divide texts into windows, and drop those without tokens to score.

        Args:
            tokens: As in the class.
            predicted: As in the class.
            ends: End of each text in `tokens`, int64 [num_texts].
            length: Most tokens that the model reads at once.
            stride: As for `window_bounds`.
        """
        rows = [
            (start + begin, start + end, start + first, number)
            for number, (start, stop) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
            for begin, end, first in window_bounds(stop - start, length, stride)
        ]
        table = np.array(rows, np.int64).reshape(-1, 4)
        made = cls(tokens, predicted, table[:, :3], table[:, 3], length)
        used = np.array([bool(made.scored_tokens(index).any()) for index in range(len(made))], bool)
        return replace(made, bounds=made.bounds[used], text_of=made.text_of[used])

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def lengths(self) -> Ints:
        """Number of tokens in each window [num_windows]."""
        return self.bounds[:, 1] - self.bounds[:, 0]

    def scored_tokens(self, index: int) -> npt.NDArray[np.bool_]:
        """Return whether each token from the first scored one of a window on is scored [num_new]."""
        _, end, first = self.bounds[index].tolist()
        if self.predicted is None:
            return np.ones(max(end - first, 0), bool)
        return np.asarray(self.predicted[first:end]).astype(bool)

    @property
    def num_predictions(self) -> int:
        return sum(int(self.scored_tokens(index).sum()) for index in range(len(self)))

    def sample(self, index: int, epoch: int = 0) -> Sample:
        begin, end, first = self.bounds[index].tolist()
        ids = np.asarray(self.tokens[begin:end]).astype(np.int64)
        labels = pad([], end - begin - 1, IGNORE_INDEX)
        labels[first - begin - 1 :] = np.where(self.scored_tokens(index), ids[first - begin :], IGNORE_INDEX)
        return Sample(with_attention_mask(ids[:-1], len(ids) - 1), labels)

    def head(self, num_samples: int | None) -> Self:
        return replace(self, bounds=self.bounds[:num_samples], text_of=self.text_of[:num_samples])
