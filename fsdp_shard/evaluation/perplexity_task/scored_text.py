"""The windows that an evaluation scores, over a text or over documents, and how much text their scored tokens are.

The text size, which makes figures of different tokenizers comparable, is that of the text as read. If only part of the
tokens is scored, as in chats or held-out windows, it is the size of the decoded scored tokens without special tokens.
Both exclude the decoded text of tokens without preceding tokens: the first token of a text, unless the tokenizer adds a
special token before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from fsdp_shard.data import (
    IGNORE_INDEX,
    DataConfig,
    DocumentRow,
    Documents,
    Ints,
    MapDataset,
    PackedRows,
    WindowDataset,
    prepare_documents,
    prepare_held_out,
    read_texts,
)
from fsdp_shard.errors import DataError
from fsdp_shard.evaluation.data_rows import skipped_lines
from fsdp_shard.evaluation.perplexity_task.strided_windows import StridedWindows

_NUM_NAMED = 5  # skipped documents to name
# Why a document is skipped.
_EMPTY, _TOO_SHORT = "empty or without anything to predict", "without a token that has one before it"


class TextSize(NamedTuple):
    """A length of text in UTF-8 bytes and in characters (code points)."""

    num_bytes: int
    num_characters: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextSize:
        """Return the total size of several texts."""
        texts = list(texts)
        return cls(sum(len(text.encode()) for text in texts), sum(map(len, texts)))

    def less(self, other: TextSize) -> TextSize:
        """Return this size minus that of a part, at least 0."""
        return TextSize(max(self.num_bytes - other.num_bytes, 0), max(self.num_characters - other.num_characters, 0))


@dataclass(frozen=True)
class ScoredDocument:
    """A data row, its scored tokens, and their text; `skip_reason` is the reason if it has none."""

    row: DocumentRow
    num_tokens: int
    size: TextSize
    skip_reason: str = ""


@dataclass(frozen=True)
class ScoredText:
    """The windows to run, and their source.

    Attributes:
        windows: The tokens and labels.
        digest: Digest of the tokens.
        size: Size of the text of all scored tokens.
        num_unscored: Tokens without a preceding token in their window; None for rows in their own windows.
        notes: Lines to print about the treatment of rows.
        documents: Every data row; None if windows do not belong to single documents.
    """

    windows: MapDataset
    digest: str
    size: TextSize
    num_unscored: int | None
    notes: tuple[str, ...] = ()
    documents: tuple[ScoredDocument, ...] | None = None

    def batches(self, batch_size: int) -> list[list[int]]:
        """Return the windows of each batch: the longest first if they are windows with a stride; rows in order."""
        order = np.arange(len(self.windows))
        if isinstance(self.windows, StridedWindows):
            order = np.argsort(-self.windows.lengths, kind="stable")
        return [order[first : first + batch_size].tolist() for first in range(0, len(order), batch_size)]

    def name_of(self, windows: Sequence[int]) -> str:
        """Describe which windows or documents these are."""
        if self.documents is None:
            return f"windows {min(windows)} to {max(windows)}"
        found = dict.fromkeys(self.documents[self.document_of[index]].row.where for index in windows)
        return ", ".join(list(found)[:_NUM_NAMED]) + (", ..." if len(found) > _NUM_NAMED else "")

    @property
    def document_of(self) -> Ints:
        """The document of each window [num_windows]."""
        assert isinstance(self.windows, StridedWindows)
        assert self.documents is not None
        numbers = [number for number, one in enumerate(self.documents) if one.row.example is not None]
        return np.array(numbers, np.int64)[self.windows.text_of]

    @property
    def num_skipped(self) -> dict[str, int]:
        """Number of unscored documents, by reason."""
        return dict(Counter(one.skip_reason for one in self.documents or () if one.skip_reason))

    @property
    def skipped_lines(self) -> list[str]:
        """A line for each reason why documents are not scored."""
        found = [(one.row.where, one.skip_reason) for one in self.documents or () if one.skip_reason]
        return skipped_lines(found, "document", _NUM_NAMED)


def open_windows(config: DataConfig, stride: int | None, tokenizer: PreTrainedTokenizerBase) -> ScoredText:
    """Open the data that training would hold out, or all of data.path if that is nothing, as windows.

    Args:
        config: The data settings.
        stride: As for `window_bounds`; only for text that continues from window to window.
        tokenizer: The model's tokenizer.

    Raises:
        DataError: The text cannot be read, or has no token to score.
    """
    rows, note = prepare_held_out(config, tokenizer)
    if not isinstance(rows, WindowDataset):
        return ScoredText(rows, rows.identity, _size_of_rows(rows, config.kind, tokenizer), None, (note,))
    ends = np.array([len(rows.tokens)], np.int64)
    windows = StridedWindows.over(rows.tokens, None, ends, config.window_length, stride)
    if not len(windows):
        raise DataError(
            f"data.sequence_length={config.window_length} with stride={stride} leaves no token to score; increase it."
        )
    ids, is_scored = np.asarray(rows.tokens), _is_scored(windows)
    whole: Iterable[str] = read_texts(config) if config.eval_fraction == 0 else [_decoded(ids, tokenizer)]
    size = TextSize.of(whole).less(_lone_tokens(ids[~is_scored], tokenizer))
    return ScoredText(windows, rows.identity, size, int((~is_scored).sum()))


def _size_of_rows(rows: MapDataset, kind: str, tokenizer: PreTrainedTokenizerBase) -> TextSize:
    """Return the size of the text of all scored tokens of rows in windows of their own, or packed."""
    if kind == "text" and isinstance(rows, PackedRows):  # whole, as windows cut characters
        documents = rows.documents()
        sizes = [TextSize.of([_decoded(ids, tokenizer)]).less(_lone_tokens(ids[:1], tokenizer)) for ids in documents]
        return TextSize(*map(sum, zip(*sizes, strict=True)))
    labels = [rows.sample(index).labels for index in range(len(rows))]
    return TextSize.of(text for one in labels for text in _decoded_runs(one, one != IGNORE_INDEX, tokenizer))


def open_documents(config: DataConfig, stride: int | None, tokenizer: PreTrainedTokenizerBase) -> ScoredText:
    """Open each row of data.eval_path, or of data.path without it, as a separate document.

    Args:
        config: The data settings.
        stride: As for `window_bounds`, for documents longer than a window.
        tokenizer: The model's tokenizer.

    Raises:
        DataError: The data cannot be read, or has no token to score.
    """
    found = prepare_documents(config, tokenizer)
    examples = found.examples
    windows = StridedWindows.over(examples.tokens, examples.predicted, examples.ends, config.window_length, stride)
    if not len(windows):
        raise DataError(f"{found.source.name} has no token to score: {_TOO_SHORT} are all of its documents.")
    is_scored = _is_scored(windows)
    documents = tuple(_scored(row, found, is_scored, tokenizer) for row in found.rows())
    size = TextSize(*map(sum, zip(*(one.size for one in documents), strict=True)))
    num_unscored = int((np.asarray(examples.predicted) != 0).sum()) - int(is_scored.sum())
    return ScoredText(windows, found.digest, size, num_unscored, (), documents)


def _scored(
    row: DocumentRow, found: Documents, is_scored: npt.NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> ScoredDocument:
    if row.example is None:
        return ScoredDocument(row, 0, TextSize(0, 0), _EMPTY)
    stop, length = int(found.examples.ends[row.example]), int(found.examples.lengths[row.example])
    ids, predicted = found.examples.tokens_of(row.example)
    own = is_scored[stop - length : stop]
    if not own.any():
        return ScoredDocument(row, 0, TextSize(0, 0), _TOO_SHORT)
    texts = [row.text] if row.text is not None else _decoded_runs(ids, predicted != 0, tokenizer)
    size = TextSize.of(texts).less(_lone_tokens(ids[(predicted != 0) & ~own], tokenizer))
    return ScoredDocument(row._replace(text=None), int(own.sum()), size)


def _is_scored(windows: StridedWindows) -> npt.NDArray[np.bool_]:
    """Return whether a window scores each token [num_tokens]."""
    found = np.zeros(len(windows.tokens), bool)
    for index, (_, end, first) in enumerate(windows.bounds.tolist()):
        found[first:end] = windows.scored_tokens(index)
    return found


def _decoded(ids: npt.NDArray[Any], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _decoded_runs(
    ids: npt.NDArray[Any], chosen: npt.NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Decode each run of neighboring chosen tokens."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [_decoded(ids[start:stop], tokenizer) for start, stop in edges.reshape(-1, 2).tolist()]


def _lone_tokens(ids: npt.NDArray[Any], tokenizer: PreTrainedTokenizerBase) -> TextSize:
    """Return the size of tokens decoded one by one; bytes of incomplete characters do not count."""
    return TextSize.of(_decoded(ids[at : at + 1], tokenizer).replace("\ufffd", "") for at in range(len(ids)))
