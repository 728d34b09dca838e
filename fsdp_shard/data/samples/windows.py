"""Divides a stream of tokens into windows of equal length.

In `WindowDataset`, window i predicts tokens i*L+1 to i*L+L from earlier tokens, so every token is predicted exactly
once. The last window may be short; it is padded, and the labels of padding are ignored.

In `MaskedWindows`, some tokens are masked and predicted. They depend on the seed, the epoch and the sample: they differ
between epochs, but are the same in a resumed run. As in BERT (Devlin et al., 2018), 80% of the chosen tokens become the
mask token, 10% a random token, and 10% stay unchanged. Special tokens, such as those between documents, are never
chosen.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import IGNORE_INDEX, Ints, Sample, pad, with_attention_mask
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.task import SpecialTokens
from fsdp_shard.data.tokenized.token_file import Array
from fsdp_shard.utils import format_count

_TO_MASK, _TO_RANDOM = 0.8, 0.9


@dataclass(frozen=True)
class TokenWindows(SourceDataset):
    """`tokens` [num_tokens], in windows of `sequence_length`; `name` identifies the token stream."""

    tokens: Array
    sequence_length: int
    name: str

    overlap: ClassVar[int] = 0  # tokens of a window that also belong to the next one

    @property
    def stride(self) -> int:
        """Tokens between the beginnings of two windows."""
        return self.sequence_length

    def __len__(self) -> int:
        return -(-max(0, len(self.tokens) - self.overlap) // self.stride)

    def slice(self, first: int, last: int) -> Self:
        start, stop = first * self.stride, last * self.stride + self.overlap
        return replace(self, tokens=self.tokens[start:stop], name=f"{self.name}+{start}")

    def window(self, index: int | None) -> Ints:
        """Return the tokens [at most stride + overlap] of a window; none for None."""
        start = len(self.tokens) if index is None else index * self.stride
        return np.asarray(self.tokens[start : start + self.stride + self.overlap], np.int64)


@dataclass(frozen=True)
class WindowDataset(TokenWindows):
    """Windows in which each token is predicted from earlier tokens; neighbors overlap by one token."""

    overlap: ClassVar[int] = 1

    @property
    def num_predictions(self) -> int:
        return max(0, len(self.tokens) - 1)

    @property
    def identity(self) -> str:
        return f"{self.name}:{len(self.tokens)}/{self.sequence_length}"

    @property
    def num_padded(self) -> int:
        """Number of positions without a token in the last window."""
        return len(self) * self.sequence_length - self.num_predictions

    @property
    def summary(self) -> str:
        padding = f", the last padded by {self.num_padded}" if self.num_padded else ""
        return f"{format_count(len(self), 'window')} of {self.sequence_length}{padding}"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        tokens = self.window(index)
        inputs = {"input_ids": pad(tokens[:-1], self.sequence_length)}
        return Sample(inputs, pad(tokens[1:], self.sequence_length, IGNORE_INDEX))


@dataclass(frozen=True)
class MaskedWindows(TokenWindows):
    """Windows in which some tokens are masked; special tokens surround each window."""

    special: SpecialTokens
    fraction: float
    seed: int

    @property
    def stride(self) -> int:
        return self.sequence_length - len(self.special.begin) - len(self.special.end)

    @property
    def identity(self) -> str:
        return f"masked-2:{self.name}:{len(self.tokens)}/{self.sequence_length}:{self.fraction}"

    @property
    def summary(self) -> str:
        windows = format_count(len(self), "window")
        return f"{windows} of {self.sequence_length}, {self.fraction:.0%} of their tokens to predict"

    def _sample(self, index: int | None, epoch: int) -> Sample:
        labels, first = pad([], self.sequence_length, IGNORE_INDEX), len(self.special.begin)
        if index is None:
            return Sample(with_attention_mask([0], self.sequence_length), labels)  # attention needs at least one token
        tokens = self.window(index)
        masked, chosen = self._mask(tokens, epoch, index)
        ids = np.concatenate([self.special.begin, masked, self.special.end])
        labels[first : first + len(tokens)] = np.where(chosen, tokens, IGNORE_INDEX)
        return Sample(with_attention_mask(ids, self.sequence_length), labels)

    def _mask(self, tokens: Ints, epoch: int, index: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Mask `tokens`; return them, and which ones were chosen: at least one, but never special ones."""
        seed = np.random.SeedSequence([self.seed, epoch, index, len(tokens)])
        raw = np.random.Philox(seed).random_raw((3, len(tokens)))
        chance, fate = (raw[:2] >> np.uint64(11)).astype(np.float64) / 2.0**53
        chance[np.isin(tokens, self.special.all)] = 1.0
        chosen = chance < max(self.fraction, np.nextafter(chance.min(), 1.0))  # none if all are special
        another = (raw[2] % np.uint64(self.special.vocabulary)).astype(np.int64)
        replaced = np.where(fate < _TO_MASK, self.special.mask, np.where(fate < _TO_RANDOM, another, tokens))
        return np.where(chosen, replaced, tokens), chosen
