"""Windows of running text in which some tokens are hidden, for masked language models. Knows no torch.

What is hidden in a sample is a function of the seed, the epoch and the sample: another part each time the text is seen,
and the same in a run that was resumed. As in BERT (Devlin et al., 2018), of those chosen 80% become the mask token,
10% another token, 10% stay. Special tokens, such as those between documents, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.sample_order import sample_indices
from fsdp_shard.data.samples.windows import MASKED, NO_WINDOW, Batch
from fsdp_shard.data.task import SpecialTokens

_TO_MASK, _TO_RANDOM = 0.8, 0.9


@dataclass(frozen=True)
class MaskedWindows:
    """`tokens` [num_tokens] in windows of `sequence_length`, framed by the special tokens.

    A sample's number counts on through the epochs: `epoch * len(self) + window`.
    """

    tokens: npt.NDArray[Any]
    sequence_length: int
    name: str
    special: SpecialTokens
    fraction: float
    seed: int

    def __len__(self) -> int:
        return -(-len(self.tokens) // self._room)

    @property
    def identity(self) -> str:
        return f"masked-2:{self.name}:{len(self.tokens)}/{self.sequence_length}:{self.fraction}"

    @property
    def num_predictions(self) -> int:
        return self.batch(range(len(self))).num_predictions

    def order(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        epochs = np.arange(first, first + count) // len(self)
        return sample_indices(seed, len(self), first, count) + epochs * len(self)

    def head(self, num_windows: int | None) -> Self:
        return self if num_windows is None or num_windows >= len(self) else self.slice(0, num_windows)

    def slice(self, first: int, last: int) -> Self:
        start, stop = first * self._room, last * self._room
        return replace(self, tokens=self.tokens[start:stop], name=f"{self.name}+{start}")

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        shape = (len(indices), self.sequence_length)
        batch = Batch(
            np.zeros(shape, np.int64), np.full(shape, MASKED, np.int64), {"attention_mask": np.zeros(shape, np.int64)}
        )
        for row, index in enumerate(indices):
            batch.others["attention_mask"][row, 0] = 1  # attention must have something to look at
            if index != NO_WINDOW:
                self._fill(batch, row, int(index))
        return batch

    @property
    def _room(self) -> int:
        return self.sequence_length - len(self.special.begin) - len(self.special.end)

    def _fill(self, batch: Batch, row: int, index: int) -> None:
        epoch, window = divmod(index, len(self))
        piece = self.tokens[window * self._room : (window + 1) * self._room].astype(np.int64)
        hidden, chosen = self._hide(piece, epoch, window)
        ids = np.concatenate([self.special.begin, hidden, self.special.end]).astype(np.int64)
        batch.input_ids[row, : len(ids)] = ids
        batch.others["attention_mask"][row, : len(ids)] = 1
        places = np.flatnonzero(chosen)
        batch.labels[row, places + len(self.special.begin)] = piece[places]

    def _hide(
        self, piece: npt.NDArray[np.int64], epoch: int, window: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """`piece` with tokens hidden, and which were chosen: at least one, but none of the special ones."""
        seed = np.random.SeedSequence([self.seed, epoch, window, len(piece)])
        raw = np.random.Philox(seed).random_raw((3, len(piece)))
        chance, fate = (raw[:2] >> np.uint64(11)).astype(np.float64) / 2.0**53
        chance[np.isin(piece, self.special.all)] = 1.0
        chosen = chance < max(self.fraction, np.nextafter(chance.min(), 1.0))  # none where all of them are special
        another = (raw[2] % np.uint64(self.special.vocabulary)).astype(np.int64)
        hidden = np.where(fate < _TO_MASK, self.special.mask, np.where(fate < _TO_RANDOM, another, piece))
        return np.where(chosen, hidden, piece), chosen
