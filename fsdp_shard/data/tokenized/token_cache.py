"""Rows as tokens in the cache: examples, or documents as one stream. They are tokenized by one process and its workers.

The name of a directory in the cache covers the rows, the tokenizer and what is made of the rows, but not the length of
windows: nothing is truncated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fsdp_shard.data.kinds.kind import Example, Kind, Tokenizer, beginning, ends_in_special, plain_ids
from fsdp_shard.data.sources.readers import Row, document_of
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized.cache_directory import cache_key, cached
from fsdp_shard.data.tokenized.row_map import map_rows, record_batches, store_rows
from fsdp_shard.data.tokenized.token_file import Examples, TokenFile
from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_count

if TYPE_CHECKING:
    import pyarrow

_ROWS_OF_DIGEST = 256  # whose arrays the digest takes together


def tokenize(source: Source, kind: Kind, tokenizer: Tokenizer, cache_dir: Path, num_workers: int = 1) -> TokenFile:
    """Tokenize the rows of a source, unless that is in the cache.

    Args:
        source: The rows.
        kind: How rows become examples, or `Documents` of one stream.
        tokenizer: The tokenizer.
        cache_dir: Directory of the cache.
        num_workers: Processes that tokenize.

    Raises:
        DataError: There is nothing to train on, the tokenizer is unusable, or the cache cannot be written.
    """
    kind.check_tokenizer(tokenizer)
    parts = [source.fingerprint(), tokenizer_state(tokenizer), getattr(tokenizer, "chat_template", None)]
    # The smallest type that has all token ids.
    encoder = _Encoder(kind, tokenizer, "<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    key = cache_key([*parts, kind.fingerprint()])
    return cached(cache_dir / key, lambda directory: _write(directory, source, encoder, num_workers))


@dataclass(frozen=True)
class Documents(Kind):
    """Documents of one stream of tokens, each after a separator, which is cut off the first one, and its beginning."""

    kind: Kind
    separator: tuple[int, ...]
    begin: tuple[int, ...]

    @classmethod
    def of(cls, kind: Kind, tokenizer: Tokenizer, begins: bool = True) -> Documents:
        """Return documents of which `kind` has the text.

        They are separated by the end-of-text token. If the tokenizer adds the beginning-of-text token to a text and
        `begins` is true, each of them begins with it.
        """
        end = end_of_text(tokenizer)
        return cls(kind, () if end is None else (end,), tuple(beginning(tokenizer)) if begins else ())

    @property
    def columns(self) -> tuple[str, ...]:
        return self.kind.columns

    def check_row(self, row: Row) -> bool:
        return self.kind.check_row(row)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Every tokenizer is suitable for a single document."""

    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[Example]]:
        found = plain_ids([document_of(row, self.columns[0]) for row in rows], tokenizer)
        return [[Example([*self.separator, *self.begin, *ids], [])] for ids in found]

    def fingerprint(self) -> Any:
        return ["stream", self.columns, self.separator, self.begin]


def encode_rows(rows: list[Row], kind: Kind, tokenizer: Tokenizer) -> list[list[Example]]:
    """Return the examples of each row; none for a row with nothing to predict."""
    are_usable = [kind.check_row(row) for row in rows]
    usable = list(compress(rows, are_usable))
    encoded = iter(kind.encode(usable, tokenizer) if usable else [])
    return [next(encoded) if is_usable else [] for is_usable in are_usable]


@dataclass(frozen=True)
class _Encoder:
    """Makes a table of the examples of some rows, each with the number of its row, and its class as JSON."""

    kind: Kind
    tokenizer: Tokenizer
    dtype: str

    @property
    def schema(self) -> pyarrow.Schema:
        import pyarrow

        tokens, predicted = (pyarrow.large_list(pyarrow.from_numpy_dtype(dtype)) for dtype in (self.dtype, "u1"))
        columns = {"tokens": tokens, "predicted": predicted, "label": pyarrow.string()}
        return pyarrow.schema(columns | dict.fromkeys(("first", "row"), pyarrow.int64()))

    def __call__(self, rows: list[tuple[int, Row]]) -> pyarrow.Table:
        import pyarrow

        encoded = self.kind.encode([row for _, row in rows], self.tokenizer)
        examples = list(chain.from_iterable(encoded))
        arrays = Examples.of(examples, [], dtype=self.dtype)
        ends = np.concatenate([[0], arrays.ends])
        lists = [
            pyarrow.LargeListArray.from_arrays(ends if len(values) else np.zeros_like(ends), pyarrow.array(values))
            for values in (arrays.tokens, arrays.predicted)
        ]
        labels = [None if example.label is None else json.dumps(example.label) for example in examples]
        numbers = [number for (number, _), found in zip(rows, encoded, strict=True) for _ in found]
        return pyarrow.table([*lists, labels, arrays.first, numbers], schema=self.schema)


def _write(directory: Path, source: Source, encoder: _Encoder, num_workers: int) -> TokenFile:
    """Write the tokens of a source into `directory`."""
    separator = encoder.kind.separator if isinstance(encoder.kind, Documents) else None
    rows_at_once = _ROWS_OF_DIGEST if separator is None else sys.maxsize
    stored = store_rows(source, encoder.kind, directory / "rows", rows_at_once)
    if separator == () and stored.num_usable > 1:
        require_separator(None, source.name)
    files = map_rows(stored, encoder, encoder.schema, num_workers, source.name) if stored.num_usable else []
    stored.file.unlink()
    found = _summarize(files, encoder.dtype, separator)
    if separator is not None and found["num_tokens"] < 2:
        count = format_count(found["num_tokens"], "token")
        documents = format_count(stored.num_rows, "document")
        raise DataError(f"{source.name} has {count} in {documents}; at least two are needed.")
    if not found["num_examples"]:
        rows = format_count(stored.num_rows, "row")
        raise DataError(f"{source.name} has nothing to train on: no token to predict in {rows}.")
    return TokenFile(
        directory=str(directory),
        sizes={file.name: file.stat().st_size for file in files},
        num_rows=stored.num_rows,
        num_dropped=stored.num_rows - found.pop("num_used"),
        keeps_last=ends_in_special(encoder.tokenizer),
        **found,
    )


def _summarize(files: Sequence[Path], dtype: str, separator: Sequence[int] | None) -> dict[str, Any]:
    """Return the digest, the classes, and the numbers of tokens, examples and used rows of Arrow files.

    `separator` is that before the first document of a stream; None stands for examples.
    """
    import pyarrow
    from pyarrow import compute

    skipped = len(separator or ())
    digest, classes = xxhash.xxh3_128(), dict[str, int]()
    num_tokens = num_examples = num_used = 0
    for _, batches in groupby(record_batches(files), lambda batch: batch["row"][0].as_py() // _ROWS_OF_DIGEST):
        table = pyarrow.Table.from_batches(list(batches))
        tokens = compute.list_flatten(table["tokens"]).to_numpy()[skipped:]
        digest.update(tokens.data)
        if separator is None:
            labels = [label and classes.setdefault(label, len(classes)) for label in table["label"].to_pylist()]
            ends = num_tokens + np.cumsum(compute.list_value_length(table["tokens"]).to_numpy(), dtype="<i8")
            digest.update(compute.list_flatten(table["predicted"]).to_numpy().data)
            digest.update(ends.data)
            digest.update(np.asarray([-1 if label is None else label for label in labels], "<i8").data)
        num_tokens, num_examples = num_tokens + len(tokens), num_examples + len(table)
        num_used, skipped = num_used + len(table["row"].unique()), 0
    names: list[str | int] = [json.loads(label) for label in classes]
    digest.update((json.dumps([dtype, names]) if separator is None else dtype).encode())
    return {
        "digest": digest.hexdigest(),
        "classes": sorted(names, key=lambda name: (isinstance(name, str), name)),
        "num_tokens": num_tokens,
        "num_examples": num_examples,
        "num_used": num_used,
    }


def tokenizer_state(tokenizer: Tokenizer) -> list[Any]:
    """Return, as JSON, everything about the tokenizer that decides about the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        backend.no_truncation()  # state of the last call, without effect on the next
        backend.no_padding()
        state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # chat templates name them
    around = tokenizer("a")["input_ids"], tokenizer(text_target="a")["input_ids"]  # languages, of targets too
    ends = [beginning(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return [state, *ends, special, getattr(tokenizer, "split_special_tokens", False), *around]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the token between documents: end-of-text or, as in BERT, [SEP]; None without either."""
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return None if end is None else int(end)


def require_separator(end: int | None, what: str) -> int:
    """Return `end`; raise DataError if the tokenizer has none. `what` names the text."""
    if end is None:
        raise DataError(
            f"{what} has several documents, but the model's tokenizer has no end-of-text token to put between them. "
            f"Set eos_token in its tokenizer_config.json, or join the text into one document."
        )
    return end
