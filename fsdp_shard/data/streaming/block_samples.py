"""The samples of a block of a stream, made a few rows at a time in the same way as those of a tokenized file.

Text continues from row to row and from block to block: tokens that do not fill a window are carried over. Rows of other
kinds have their own windows. Packed rows are packed with those of their block.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xxhash

from fsdp_shard.data.config import is_running_text, kind_of
from fsdp_shard.data.kinds import kind
from fsdp_shard.data.sample_order import permutation
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.sources.readers import Row, document_of
from fsdp_shard.data.tokenized.example_cache import Examples, encode_rows
from fsdp_shard.data.tokenized.token_cache import end_of_text, require_separator

_ROWS_AT_ONCE = 8  # enough for the tokenizer's threads; no more than these are tokenized ahead of need


@dataclass
class Counts:
    """Rows read, examples used, rows and examples dropped, examples truncated, tokens."""

    rows: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class BlockOrder:
    """The seeded orders of one block; `first` is the index of its first sample."""

    seed: int
    epoch: int
    block: int
    first: int
    is_shuffled: bool

    def permutation(self, size: int, purpose: int = 0) -> list[int]:
        """Return a permutation of `size` items, another one for each `purpose`."""
        if not self.is_shuffled:
            return list(range(size))
        order: list[int] = permutation(size, self.seed, self.epoch, self.block, purpose).tolist()
        return order


@dataclass(frozen=True)
class BlockTokenizer(ABC):
    """Makes the samples of a block out of its rows."""

    factory: SampleFactory
    tokenizer: kind.Tokenizer

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""

    @abstractmethod
    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, order: BlockOrder) -> Iterator[MapDataset]:
        """Yield datasets of the samples of a block.

        Args:
            rows: The rows of the block.
            carry: Tokens left over from the block before; updated.
            counts: Counts over all blocks; updated.
            order: The seeded orders of the block.
        """

    def sample_order(self, part: MapDataset, order: BlockOrder) -> Sequence[int]:
        """Return the order of the samples of a part."""
        return range(len(part))


@dataclass(frozen=True)
class TextBlocks(BlockTokenizer):
    """Documents that continue from window to window."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.factory.config.text_column,)

    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, order: BlockOrder) -> Iterator[MapDataset]:
        config, special = self.factory.config, self.factory.special
        step = self.factory.window_tokens
        overlap = int(special is None)  # the last token that a window predicts is the first one of the next window
        begin = kind.beginning(self.tokenizer) if special is None else []  # else every window has them
        end = require_separator(end_of_text(self.tokenizer), f"{config.where}.path={config.path}")
        first = order.first
        for group in _groups(rows):
            documents = [document_of(row, config.text_column) for row in group]
            counts.rows += len(group)
            for ids in kind.plain_ids([text for text in documents if text.strip()], self.tokenizer):
                piece = [*([end] if counts.used else []), *begin, *ids]
                counts.used, counts.tokens = counts.used + 1, counts.tokens + len(piece)
                carry += piece
            counts.dropped += sum(not text.strip() for text in documents)
            if (num := (len(carry) - overlap) // step) > 0:
                seed = xxhash.xxh3_64_intdigest(f"{self.factory.seed} {first}".encode())
                yield self.factory.windows(np.asarray(carry[: num * step + overlap], np.int64), "", seed)
                first += num
                del carry[: num * step]


@dataclass(frozen=True)
class RowBlocks(BlockTokenizer):
    """Rows of the other kinds. With packing all rows of a block are tokenized at once, to be packed together."""

    row_kind: kind.Kind
    keeps_last: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return self.row_kind.columns

    def parts(self, rows: Sequence[Row], carry: list[int], counts: Counts, order: BlockOrder) -> Iterator[MapDataset]:
        for group in [rows] if self.factory.config.packing else _groups(rows):
            encoded = [row for few in _groups(group) for row in encode_rows(list(few), self.row_kind, self.tokenizer)]
            examples = list(chain.from_iterable(encoded))
            counts.rows += len(group)
            counts.dropped += sum(not row for row in encoded)
            if not examples:
                continue
            arrays, classes = _arrays(examples, self.keeps_last)
            cut = self.factory.cut(arrays)
            counts.used += len(cut.kept)
            counts.dropped += cut.num_dropped
            counts.truncated += cut.num_truncated
            counts.tokens += len(arrays.tokens)
            if len(cut.kept):
                yield self.factory.samples(arrays, cut, classes)

    def sample_order(self, part: MapDataset, order: BlockOrder) -> Sequence[int]:
        """Packed windows are shuffled, as packing sorts them."""
        packing = self.factory.config.packing
        return order.permutation(len(part), purpose=1) if packing else super().sample_order(part, order)


def block_tokenizer(factory: SampleFactory, tokenizer: kind.Tokenizer) -> BlockTokenizer:
    """Return what makes samples of blocks by the settings of a source; raise DataError if the tokenizer is unusable."""
    config, task = factory.config, factory.task.name
    if is_running_text(config, task):
        assert factory.window_tokens
        require_separator(end_of_text(tokenizer), f"{config.where}.path={config.path}")
        return TextBlocks(factory, tokenizer)
    row_kind = kind_of(config, task)
    row_kind.check_tokenizer(tokenizer)
    return RowBlocks(factory, tokenizer, row_kind, kind.ends_in_special(tokenizer))


def _groups(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[start : start + _ROWS_AT_ONCE]


def _arrays(examples: Sequence[kind.Example], keeps_last: bool) -> tuple[Examples, list[str | int]]:
    """Return examples as arrays, and the names of the classes that `labels` are indices of."""
    classes = list(dict.fromkeys(example.label for example in examples if example.label is not None))
    labels = [-1 if example.label is None else classes.index(example.label) for example in examples]
    return Examples.of(examples, labels, keeps_last), classes
