"""Documents for evaluation one at a time: rows with all of their tokens, their locations and their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_shard.data.config import DataConfig, cache_directory, kind_of
from fsdp_shard.data.kinds.chat_template import with_chat_template
from fsdp_shard.data.kinds.kind import Example, Kind, Tokenizer, beginning_tokens, plain_ids
from fsdp_shard.data.kinds.plain_text import TextKind
from fsdp_shard.data.samples.batch import Ints
from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.sources.source import Source, open_source
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.errors import DataError
from fsdp_shard.models import CAUSAL

NAMES = ("id", "name")  # columns that name a row; the first one present counts


@dataclass(frozen=True)
class WholeText(TextKind):
    """Each text as one example of any length: `begin` and the text's tokens, without an end token."""

    begin: tuple[int, ...]

    def examples(self, read: list[str], tokenizer: Tokenizer) -> list[list[Example]]:
        begin, unpredicted = list(self.begin), [False] * len(self.begin)
        return [[Example([*begin, *ids], [*unpredicted, *[True] * len(ids)])] for ids in plain_ids(read, tokenizer)]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Every tokenizer is suitable."""

    def fingerprint(self) -> Any:
        return ["whole text", self.columns, self.begin]


class DocumentRow(NamedTuple):
    """A row of the data.

    Attributes:
        where: File and line or number of the row.
        name: Its value in a column id or name; None without such a column.
        example: The number of its example; None if it is empty, or has nothing to predict.
        text: Its text if it is plain text; None for chats, instructions and pairs.
    """

    where: str
    name: str | int | None
    example: int | None
    text: str | None


@dataclass(frozen=True)
class Documents:
    """The rows of some data and their tokens.

    Attributes:
        examples: The tokens of rows, and which of them are predicted: all tokens of text, otherwise as in training.
        digest: The digest of these tokens.
        source: The rows.
        kind: Their kind.
        counts: Examples of each row, 0 or 1 [num_rows].
    """

    examples: Examples
    digest: str
    source: Source
    kind: Kind
    counts: Ints

    def rows(self) -> Iterator[DocumentRow]:
        """Read the rows again, in order; raises DataError if they have changed since they were tokenized."""
        rows, example = rows_again(self.source, self.kind.columns, len(self.counts)), 0
        for row, has_example in zip(rows, map(bool, self.counts), strict=True):
            text = self.kind.read(row) if has_example and isinstance(self.kind, WholeText) else None
            yield DocumentRow(row.where, name_of(row, self.kind.columns), example if has_example else None, text)
            example += has_example


def open_evaluated(config: DataConfig) -> Source:
    """Open `data.eval_path`, or data.path without it; raises DataError."""
    return open_source(config, config.eval_path is not None)


def rows_again(source: Source, columns: Sequence[str], num_rows: int) -> Iterator[Row]:
    """Read `columns` and names of rows again; raises DataError unless there are still `num_rows`."""
    number = 0
    for number, row in enumerate(source.rows((*columns, *NAMES)), start=1):
        if number > num_rows:
            break
        yield row
    if number != num_rows:
        raise was_changed(source)


def was_changed(source: Source) -> DataError:
    """Return the error for rows that have changed since they were tokenized."""
    return DataError(f"{source.name} was changed while it was read; start again.")


def name_of(row: Row, columns: Sequence[str]) -> str | int | None:
    """Return a row's value in a column `id` or `name` that is not one of `columns`; None without such a column."""
    values = (row.values.get(name) for name in NAMES if name not in columns)
    return next((value for value in values if isinstance(value, (str, int))), None)


def prepare_documents(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """Tokenize each row of `data.eval_path`, or of data.path without it, unless the result is cached.

    Args:
        config: The settings of the data.
        tokenizer: The tokenizer. Text begins with its beginning-of-text token, if it adds that to every text.

    Raises:
        DataError: The data cannot be read, or has nothing to predict.
    """
    source, tokenizer = open_evaluated(config), with_chat_template(tokenizer, config)
    is_text = config.kind == "text"
    begin = tuple(beginning_tokens(tokenizer))
    kind = WholeText(config.text_column, None, begin) if is_text else kind_of(config, CAUSAL)
    file = tokenize(source, kind, tokenizer, cache_directory(config), config.workers)
    return Documents(file.examples(), file.digest, source, kind, file.examples_per_row())


def read_texts(config: DataConfig) -> Iterator[str]:
    """Read the non-empty texts of `data.eval_path`, or of data.path without it; raises DataError."""
    kind = kind_of(config, CAUSAL)
    return (text for row in open_evaluated(config).rows(kind.columns) if (text := kind.read(row)) is not None)
