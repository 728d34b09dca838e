"""Tokenized data on disk: Arrow files in a cache directory, which every process maps into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.kinds.kind import ends_in_special
from fsdp_shard.data.tokenized.encoder import NONE, Encoder
from fsdp_shard.errors import DataError
from fsdp_shard.models import tokenizer_files
from fsdp_shard.utils import format_count, fsync_path, write_file

if TYPE_CHECKING:
    import pyarrow

_FORMAT_VERSION = 4
_ROWS_OF_DIGEST = 256  # rows hashed together; older runs have recorded such digests

# An array, or a column of mapped Arrow files: `np.asarray` of a slice reads only that slice.
Array: TypeAlias = "npt.NDArray[Any] | pyarrow.ChunkedArray"


@dataclass(frozen=True)
class Examples:
    """Examples as arrays.

    Attributes:
        tokens: Token ids [num_tokens].
        predicted: Whether each token is predicted, uint8 [num_tokens].
        ends: End of each example in `tokens`, int64 [num_examples].
        first: Position of the first predicted token within each example, -1 without one; int64 [num_examples].
        labels: The class of each example, -1 without one; int64 [num_examples].
        name: Identifies the examples.
        keeps_last: Whether the last token ends a text, and is kept when the text is truncated.
        margins: The margin of each example, float64 [num_examples]; empty if the data has none.
    """

    tokens: Array
    predicted: Array
    ends: npt.NDArray[Any]
    first: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    name: str = ""
    keeps_last: bool = False
    margins: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(
        cls, table: pyarrow.Table, classes: Sequence[str | int], name: str = "", keeps_last: bool = False
    ) -> Examples:
        """Return the examples in a table of tokens; the labels are indices of `classes`."""
        import pyarrow
        from pyarrow import compute

        names = pyarrow.array([json.dumps(name) for name in classes], pyarrow.string())
        labels = compute.index_in(compute.list_flatten(table["label"]), names).fill_null(NONE)
        return cls(
            tokens=compute.list_flatten(table["tokens"]),
            predicted=compute.list_flatten(table["predicted"]),
            ends=np.cumsum(compute.list_flatten(table["lengths"]).to_numpy(), dtype=np.int64),
            first=compute.list_flatten(table["first"]).to_numpy(),
            labels=labels.to_numpy().astype(np.int64),
            name=name,
            keeps_last=keeps_last,
            margins=compute.list_flatten(table["margin"]).to_numpy(),
        )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens in each example [num_examples]."""
        return np.diff(self.ends, prepend=0)

    def tokens_of(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the token ids of one example, and whether each is predicted, both [length]."""
        start, stop = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return np.asarray(self.tokens[start:stop]), np.asarray(self.predicted[start:stop])


def classes_of(table: pyarrow.Table) -> list[str | int]:
    """Return the classes in a table of tokens, in order of appearance."""
    from pyarrow import compute

    return [json.loads(label) for label in compute.list_flatten(table["label"]).unique().drop_null().to_pylist()]


@dataclass(frozen=True)
class TokenFile:
    """One tokenized source: a stream of tokens, or examples.

    Attributes:
        directory: Directory of its files.
        sizes: Bytes of each file by name, in order.
        num_rows: Number of rows in the source.
        num_dropped: Number of rows without training content.
        num_tokens: Number of tokens in all rows.
        digest: Digest of only the tokens and the values stored with them: equal digests mean equal samples.
        num_examples: Number of examples or documents.
        classes: The names of the classes by index.
        keeps_last: Whether the last token ends a text, and is kept when the text is truncated.
    """

    directory: str
    sizes: dict[str, int]
    num_rows: int
    num_dropped: int
    num_tokens: int
    digest: str
    num_examples: int
    classes: list[str | int] = field(default_factory=list)
    keeps_last: bool = False

    @classmethod
    def read(cls, directory: Path) -> TokenFile | None:
        """Read meta.json; return None if the directory is absent, incomplete, or of another version."""
        try:
            meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
            if meta.pop("format_version") != _FORMAT_VERSION:
                return None
            found = cls(**{**meta, "directory": str(directory)})
            is_complete = all((directory / name).stat().st_size == size for name, size in found.sizes.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return found if is_complete else None

    def write_meta(self) -> None:
        """Write meta.json."""
        values = {"format_version": _FORMAT_VERSION, **asdict(self)}
        write_file(Path(self.directory) / "meta.json", json.dumps(values, indent=1))

    def tokens(self) -> Array:
        """Map the tokens of a stream, without the separator before the first document."""
        from pyarrow import compute

        tokens = compute.list_flatten(self._table()["tokens"])
        return tokens[len(tokens) - self.num_tokens :]

    def examples(self) -> Examples:
        """Map the examples."""
        return Examples.of(self._table(), self.classes, self.digest, self.keeps_last)

    def examples_per_row(self) -> npt.NDArray[np.int64]:
        """Return the number of examples in each row [num_rows], 0 for rows with nothing to learn."""
        from pyarrow import compute

        counts: npt.NDArray[Any] = compute.list_value_length(self._table()["lengths"]).to_numpy()
        return counts.astype(np.int64)

    def _table(self) -> pyarrow.Table:
        import pyarrow

        try:
            files = [pyarrow.memory_map(str(Path(self.directory) / name)) for name in self.sizes]
            return pyarrow.concat_tables([pyarrow.ipc.open_stream(file).read_all() for file in files])
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{self.directory} cannot be mapped ({error}); every rank must see the token cache. Set "
                f"data.cache_dir to a directory that all machines share."
            ) from error


def summarize(files: Sequence[Path], encoder: Encoder, name: str) -> TokenFile:
    """Count and hash the tokens in Arrow files, and flush the files to disk.

    Args:
        files: The files of one directory, in row order.
        encoder: The encoder that wrote them.
        name: Setting and value of the source, for messages.

    Raises:
        DataError: There are no rows to train on.
    """
    from pyarrow import compute

    dtype = np.dtype(encoder.schema.field("tokens").type.value_type.to_pandas_dtype()).newbyteorder("<").str
    separators = encoder.kind.stream_separators
    num_rows = num_tokens = num_examples = num_used = 0
    digest, classes = xxhash.xxh3_128(), dict[str | int, int]()
    for table in _groups(files):
        for label in classes_of(table):
            classes.setdefault(label, len(classes))
        examples = Examples.of(table, list(classes))
        tokens = np.asarray(examples.tokens)[0 if num_examples else len(separators or ()) :]
        digest.update(tokens.data)
        if separators is None:
            for array in (
                np.asarray(examples.predicted),
                num_tokens + examples.ends,
                examples.labels,
                examples.margins,
            ):
                digest.update(array.data)
        num_rows += len(table)
        num_tokens += len(tokens)
        num_examples += len(examples)
        num_used += int(np.count_nonzero(compute.list_value_length(table["lengths"]).to_numpy()))
    if separators is not None and num_tokens < 2:
        count, documents = format_count(num_tokens, "token"), format_count(num_rows, "document")
        tokenizer = tokenizer_files(encoder.tokenizer) or "the tokenizer"
        raise DataError(f"{name} has {count} in {documents}, as {tokenizer} tokenizes it; at least two are needed.")
    if not num_examples:
        rows = format_count(num_rows, "row")
        raise DataError(f"{name} has nothing to train on: no token to predict in {rows}.")
    digest.update((json.dumps([dtype, list(classes)]) if separators is None else dtype).encode())
    return TokenFile(
        directory=str(files[0].parent),
        sizes={file.name: file.stat().st_size for file in files},
        num_rows=num_rows,
        num_dropped=num_rows - num_used,
        num_tokens=num_tokens,
        digest=digest.hexdigest(),
        num_examples=num_examples,
        classes=sorted(classes, key=lambda name: (isinstance(name, str), name)),
        keeps_last=ends_in_special(encoder.tokenizer),
    )


def _groups(files: Sequence[Path]) -> Iterator[pyarrow.Table]:
    """Read the rows in Arrow files, those hashed together at a time, and flush the files to disk."""
    import pyarrow

    held = list[pyarrow.RecordBatch]()
    for file in files:
        fsync_path(file)
        with pyarrow.OSFile(str(file)) as stream:  # mapped pages would count as memory
            for batch in pyarrow.ipc.open_stream(stream):
                held.append(batch)
                while sum(map(len, held)) >= _ROWS_OF_DIGEST:
                    table = pyarrow.Table.from_batches(held)
                    yield table[:_ROWS_OF_DIGEST]
                    held = table[_ROWS_OF_DIGEST:].to_batches()
    if held:
        yield pyarrow.Table.from_batches(held)
