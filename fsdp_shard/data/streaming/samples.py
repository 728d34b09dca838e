"""What becomes of the rows of a block of a stream: samples, made a few rows at a time, as those of a whole file are.

Running text goes on from row to row and from block to block: what does not fill a window is carried on. Rows have
windows of their own. Packed rows are packed with those of their block. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fsdp_shard.data.kinds.kind import Example, Kind, plain_ids
from fsdp_shard.data.samples.padded import Cut
from fsdp_shard.data.samples.protocol import HeldOut
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import document_of
from fsdp_shard.data.tokenized.example_cache import Examples, encode_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 8  # enough for the tokenizer's threads; no more than these are tokenized ahead of need


@dataclass
class Counts:
    """Rows that were read, examples to learn from, rows and examples without, examples that were cut, tokens."""

    rows: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0


class Shuffled(Protocol):
    """The seeded orders of a block."""

    @property
    def first(self) -> int: ...

    def permutation(self, size: int, purpose: int = 0) -> list[int]: ...


class Maker(Protocol):
    """Rows to samples."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""

    @property
    def sequence_length(self) -> int: ...

    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, shuffled: Shuffled) -> Iterator[HeldOut]:
        """Data sets of the samples of a block, one after the other; `carry` and `counts` are brought up to date."""

    def order(self, part: HeldOut, shuffled: Shuffled) -> Sequence[int]:
        """The order in which the samples of a part come."""


@dataclass(frozen=True)
class TextMaker:
    """Documents that run on from window to window. A window takes `room` tokens, and `overlap` ones that are the next's
    too; `windows(tokens, first)` are those of whole windows, of which the number of the first is given.
    """

    column: str
    sequence_length: int
    room: int
    overlap: int
    windows: Callable[[Any, int], HeldOut]
    tokenizer: PreTrainedTokenizerBase
    begin: list[int]
    end: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, shuffled: Shuffled) -> Iterator[HeldOut]:
        first = shuffled.first
        for some in _groups(rows):
            documents = [document_of(row, self.column) for row in some]
            counts.rows += len(some)
            for ids in plain_ids([text for text in documents if text.strip()], self.tokenizer):
                piece = [*([self.end] if counts.used else []), *self.begin, *ids]
                counts.used, counts.tokens = counts.used + 1, counts.tokens + len(piece)
                carry += piece
            counts.dropped += sum(not text.strip() for text in documents)
            if (num := (len(carry) - self.overlap) // self.room) > 0:
                yield self.windows(np.asarray(carry[: num * self.room + self.overlap], np.int64), first)
                first += num
                del carry[: num * self.room]

    def order(self, part: HeldOut, shuffled: Shuffled) -> Sequence[int]:
        return range(len(part))


@dataclass(frozen=True)
class RowMaker:
    """Rows by their `kind`; `cut` and `samples` are what is made of the examples of a file as well.

    With `packing` the rows of a block are packed together, so all of them are tokenized at once.
    """

    kind: Kind
    sequence_length: int
    packing: bool
    cut: Callable[[Examples], Cut]
    samples: Callable[[Examples, Cut, list[str | int]], HeldOut]
    tokenizer: PreTrainedTokenizerBase
    keeps_last: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return self.kind.columns

    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, shuffled: Shuffled) -> Iterator[HeldOut]:
        for some in [rows] if self.packing else _groups(rows):
            encoded = list(
                chain.from_iterable(encode_rows(list(few), self.kind, self.tokenizer) for few in _groups(some))
            )
            examples = list(chain.from_iterable(encoded))
            counts.rows += len(some)
            counts.dropped += sum(not row for row in encoded)
            if not examples:
                continue
            arrays, classes = _arrays(examples, self.keeps_last)
            cut = self.cut(arrays)
            counts.used += len(cut.kept)
            counts.dropped += cut.num_dropped
            counts.truncated += cut.num_truncated
            counts.tokens += len(arrays.tokens)
            if len(cut.kept):
                yield self.samples(arrays, cut, classes)

    def order(self, part: HeldOut, shuffled: Shuffled) -> Sequence[int]:
        """Packed windows come in an order that no seed decides about, so they are shuffled."""
        return shuffled.permutation(len(part), purpose=1) if self.packing else range(len(part))


def _groups(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[at : at + _ROWS_AT_ONCE]


def _arrays(examples: Sequence[Example], keeps_last: bool) -> tuple[Examples, list[str | int]]:
    """`examples` as arrays, and the names of the classes that `labels` are numbers of."""
    classes = list(dict.fromkeys(example.label for example in examples if example.label is not None))
    labels = [-1 if example.label is None else classes.index(example.label) for example in examples]
    arrays = Examples(
        tokens=np.fromiter(chain.from_iterable(example.ids for example in examples), np.int64),
        predicted=np.fromiter(chain.from_iterable(example.predicted for example in examples), np.uint8),
        ends=np.cumsum([len(example.ids) for example in examples]),
        first=np.asarray([e.predicted.index(True) if True in e.predicted else -1 for e in examples], np.int64),
        labels=np.asarray(labels, np.int64),
        name="",
        keeps_last=keeps_last,
    )
    return arrays, classes
