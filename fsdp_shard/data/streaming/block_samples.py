"""The samples of a block of a stream, made in the same way as those of a tokenized file.

Text continues from row to row and from block to block: tokens that do not fill a window are carried over. Rows of other
kinds have their own windows. Packed rows are packed with those of their block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock

import numpy as np
import xxhash

from fsdp_shard.data.config import is_running_text, kind_of
from fsdp_shard.data.kinds import kind
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.sources.readers import Row, document_of
from fsdp_shard.data.streaming.block_reader import EncodedExample, Rows
from fsdp_shard.data.tokenized.token_cache import encode_rows, end_of_text, require_separator
from fsdp_shard.data.tokenized.token_file import Examples

_ROWS_OF_A_PART = 8  # of text: which tokens a masked language model predicts depends on it


@dataclass
class Counts:
    """Rows read, examples used, rows and examples dropped, examples truncated, tokens."""

    rows: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class RowBlocks:
    """Tokenizes rows, and makes the samples of a block of them: with packing those of the block are packed together.

    `lock` is held while rows are tokenized, as the streams of a mixture have one tokenizer, each in its own thread.
    """

    factory: SampleFactory
    tokenizer: kind.Tokenizer
    lock: Lock
    row_kind: kind.Kind
    keeps_last: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return self.row_kind.columns

    def encode(self, rows: list[Row]) -> list[list[kind.Example]]:
        """Return the examples of each row; none for a row with nothing to learn."""
        with self.lock:
            return encode_rows(rows, self.row_kind, self.tokenizer)

    def parts(self, rows: Rows, carry: list[int], counts: Counts, first: int) -> list[MapDataset]:
        """Return datasets of the samples of a block.

        Args:
            rows: The rows of the block.
            carry: Tokens left over from the block before; updated.
            counts: Counts over all blocks, these rows included; updated.
            first: Index of the first sample of the block.
        """
        examples, classes = _arrays(list(chain.from_iterable(rows)), self.keeps_last)
        cut = self.factory.cut(examples)
        counts.used += len(cut.kept)
        counts.dropped += cut.num_dropped
        counts.truncated += cut.num_truncated
        counts.tokens += len(examples.tokens)
        return [self.factory.samples(examples, cut, classes)] if len(cut.kept) else []


@dataclass(frozen=True)
class TextBlocks(RowBlocks):
    """Documents that continue from window to window, with `begin` before each of them and `end` between them."""

    begin: list[int]
    end: int

    def encode(self, rows: list[Row]) -> list[list[kind.Example]]:
        documents = [document_of(row, self.factory.config.text_column) for row in rows]
        with self.lock:
            encoded = iter(kind.plain_ids([text for text in documents if text.strip()], self.tokenizer))
        return [[kind.Example(next(encoded), [])] if text.strip() else [] for text in documents]

    def parts(self, rows: Rows, carry: list[int], counts: Counts, first: int) -> list[MapDataset]:
        step = self.factory.window_tokens
        overlap = int(self.factory.special is None)  # the last token that a window predicts is the first of the next
        left, parts = np.asarray(carry, np.int32), list[MapDataset]()
        for start in range(0, len(rows), _ROWS_OF_A_PART):
            pieces = [left]
            for document in chain.from_iterable(rows[start : start + _ROWS_OF_A_PART]):
                before = [*([self.end] if counts.used else []), *self.begin]
                pieces += [np.asarray(before, np.int32), np.frombuffer(document.tokens, np.int32)]
                counts.used += 1
            tokens = np.concatenate(pieces)
            counts.tokens += len(tokens) - len(left)
            num = max(0, (len(tokens) - overlap) // step)
            if num:
                seed = xxhash.xxh3_64_intdigest(f"{self.factory.seed} {first}".encode())
                parts.append(self.factory.windows(tokens[: num * step + overlap], "", seed))
            left, first = tokens[num * step :], first + num
        carry[:] = left.tolist()
        return parts


def block_tokenizer(factory: SampleFactory, tokenizer: kind.Tokenizer, lock: Lock) -> RowBlocks:
    """Return what makes samples of blocks by the settings of a source; raise DataError if the tokenizer is unusable."""
    config, task = factory.config, factory.task.name
    row_kind, keeps_last = kind_of(config, task), kind.ends_in_special(tokenizer)
    if not is_running_text(config, task):
        row_kind.check_tokenizer(tokenizer)
        return RowBlocks(factory, tokenizer, lock, row_kind, keeps_last)
    assert factory.window_tokens
    begin = kind.beginning(tokenizer) if factory.special is None else []  # else every window has one
    end = require_separator(end_of_text(tokenizer), f"{config.where}.path={config.path}")
    return TextBlocks(factory, tokenizer, lock, row_kind, keeps_last, begin, end)


def _arrays(examples: Sequence[EncodedExample], keeps_last: bool) -> tuple[Examples, list[str | int]]:
    """Return examples as arrays, and the names of the classes that `labels` are indices of."""
    classes = list(dict.fromkeys(example.label for example in examples if example.label is not None))
    labels = [-1 if example.label is None else classes.index(example.label) for example in examples]
    arrays = Examples(
        tokens=np.frombuffer(b"".join(example.tokens for example in examples), np.int32),
        predicted=np.frombuffer(b"".join(example.predicted for example in examples), np.uint8),
        ends=np.cumsum([len(example.predicted) for example in examples], dtype=np.int64),
        first=np.asarray([example.predicted.find(1) for example in examples], np.int64),
        labels=np.asarray(labels, np.int64),
        name="",
        keeps_last=keeps_last,
    )
    return arrays, classes
