"""A stream of tokens as windows of one length.

In `WindowDataset`, window i predicts tokens i*L+1 to i*L+L from those before them: no token is predicted twice and none
is left out. The last window may be short; it is padded, and the padding is masked.

In `MaskedWindows`, some tokens are masked and predicted. Which ones follows from the seed, the epoch and the sample:
others in each epoch, and the same in a resumed run. As in BERT (Devlin et al., 2018), 80% of the chosen tokens become
the mask token, 10% a random token, and 10% stay. Special tokens, such as those between documents, are never chosen.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.batch import NO_WINDOW, Batch, Indices, Ints, empty_batch
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.task import SpecialTokens
from fsdp_shard.data.tokenized.token_file import Array
from fsdp_shard.utils import format_count

_TO_MASK, _TO_RANDOM = 0.8, 0.9


@dataclass(frozen=True)
class WindowDataset(MapDataset):
    """`tokens` [num_tokens] in windows of `sequence_length`; `name` identifies the stream of tokens."""

    tokens: Array
    sequence_length: int
    name: str

    def __len__(self) -> int:
        return -(-self.num_predictions // self.sequence_length)

    @property
    def num_predictions(self) -> int:
        return max(0, len(self.tokens) - 1)

    @property
    def identity(self) -> str:
        return f"{self.name}:{len(self.tokens)}/{self.sequence_length}"

    @property
    def num_padded(self) -> int:
        """Positions without a token in the last window."""
        return len(self) * self.sequence_length - self.num_predictions

    @property
    def summary(self) -> str:
        padded = f", the last padded by {self.num_padded}" if self.num_padded else ""
        return f"{format_count(len(self), 'window')} of {self.sequence_length}{padded}"

    def batch(self, indices: Indices) -> Batch:
        batch = empty_batch(len(indices), self.sequence_length)
        for row, index in enumerate(indices):
            if index != NO_WINDOW:
                start = self.checked(int(index)) * self.sequence_length
                piece = np.asarray(self.tokens[start : start + self.sequence_length + 1])
                batch.input_ids[row, : len(piece) - 1] = piece[:-1]
                batch.labels[row, : len(piece) - 1] = piece[1:]
        return batch

    def slice(self, first: int, last: int) -> Self:
        """Return windows [first, last). Neighboring slices share one token, which only the earlier one predicts."""
        start, stop = first * self.sequence_length, last * self.sequence_length + 1
        return replace(self, tokens=self.tokens[start:stop], name=f"{self.name}+{start}")


@dataclass(frozen=True)
class MaskedWindows(MapDataset):
    """`tokens` [num_tokens] in windows of `sequence_length`, each between the special tokens.

    The index of a sample includes the epoch: `epoch * len(self) + window`.
    """

    tokens: Array
    sequence_length: int
    name: str
    special: SpecialTokens
    fraction: float
    seed: int

    def __len__(self) -> int:
        return -(-len(self.tokens) // self._window_length)

    @property
    def identity(self) -> str:
        return f"masked-2:{self.name}:{len(self.tokens)}/{self.sequence_length}:{self.fraction}"

    @property
    def num_predictions(self) -> int:
        return self.batch(range(len(self))).num_predictions

    @property
    def summary(self) -> str:
        return f"{format_count(len(self), 'window')} of {self.sequence_length}, {self.fraction:.0%} of them to predict"

    def order(self, seed: int, first: int, count: int) -> Ints:
        epochs = np.arange(first, first + count) // len(self)
        return super().order(seed, first, count) + epochs * len(self)

    def slice(self, first: int, last: int) -> Self:
        start, stop = first * self._window_length, last * self._window_length
        return replace(self, tokens=self.tokens[start:stop], name=f"{self.name}+{start}")

    def batch(self, indices: Indices) -> Batch:
        batch = empty_batch(len(indices), self.sequence_length, "attention_mask")
        for row, index in enumerate(indices):
            batch.others["attention_mask"][row, 0] = 1  # attention needs at least one token
            if index != NO_WINDOW:
                self._fill(batch, row, int(index))
        return batch

    @property
    def _window_length(self) -> int:
        return self.sequence_length - len(self.special.begin) - len(self.special.end)

    def _fill(self, batch: Batch, row: int, index: int) -> None:
        epoch, window = divmod(index, len(self))
        start = window * self._window_length
        piece = np.asarray(self.tokens[start : start + self._window_length], np.int64)
        masked, chosen = self._mask(piece, epoch, window)
        ids = np.concatenate([self.special.begin, masked, self.special.end]).astype(np.int64)
        batch.input_ids[row, : len(ids)] = ids
        batch.others["attention_mask"][row, : len(ids)] = 1
        positions = np.flatnonzero(chosen)
        batch.labels[row, positions + len(self.special.begin)] = piece[positions]

    def _mask(self, piece: Ints, epoch: int, window: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Mask tokens of `piece`; return it, and which tokens were chosen: at least one, but no special ones."""
        seed = np.random.SeedSequence([self.seed, epoch, window, len(piece)])
        raw = np.random.Philox(seed).random_raw((3, len(piece)))
        chance, fate = (raw[:2] >> np.uint64(11)).astype(np.float64) / 2.0**53
        chance[np.isin(piece, self.special.all)] = 1.0
        chosen = chance < max(self.fraction, np.nextafter(chance.min(), 1.0))  # none where all of them are special
        another = (raw[2] % np.uint64(self.special.vocabulary)).astype(np.int64)
        replaced = np.where(fate < _TO_MASK, self.special.mask, np.where(fate < _TO_RANDOM, another, piece))
        return np.where(chosen, replaced, piece), chosen
