"""Rows of a file, one at a time, by the ending of its name: plain text, JSON lines, CSV, Parquet.

The standard library reads all but Parquet. Knows no settings and nothing of tokens.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_size, nearest


class Row(NamedTuple):
    """Values by column, and where the row stands, for messages. A document of a plain text file has only `text`."""

    where: str
    values: dict[str, Any]
    is_text: bool = False


def read_rows(file: Path, sample_by: str, columns: Sequence[str] | None) -> Iterator[Row]:
    """The rows of `file`; a plain text is cut by `sample_by`, and only `columns` of a Parquet file are read."""
    try:
        yield from _READERS[file.suffix.lower()](file, sample_by, columns)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}. Convert it, or leave it out.") from error


def require_column(column: str, columns: Sequence[str], where: str, setting: str) -> None:
    """Raise DataError unless `column` is one of `columns`."""
    if column not in columns:
        raise DataError(
            f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}{nearest(column, columns)}. "
            f"Set {setting}."
        )


def text_of(value: object, column: str, where: str, setting: str) -> str:
    """`value` as text, the empty one for null; raises DataError when it is anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, expected text. Set {setting}.")
    return value


def _read_text(file: Path, sample_by: str, columns: Sequence[str] | None) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, text in enumerate(_pieces(stream, sample_by)):
            yield Row(f"{file}, {sample_by} {number}", {"text": text}, is_text=True)


def _pieces(stream: TextIO, sample_by: str) -> Iterator[str]:
    if sample_by == "line":
        yield from (line.rstrip("\n") for line in stream)
    elif sample_by == "paragraph":
        yield from _paragraphs(stream)
    else:
        yield stream.read()


def _paragraphs(lines: Iterator[str] | TextIO) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).rstrip("\n")
            paragraph = []
    if paragraph:
        yield "".join(paragraph).rstrip("\n")


def _read_json_lines(file: Path, sample_by: str, columns: Sequence[str] | None) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield json_row(file, number, line)


_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _is_text(row: Mapping[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def json_row(file: Path, number: int, line: str) -> Row:
    """The row that a line of a file of JSON lines holds; DataError when it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, a thousand levels
        raise DataError(f"{file}, line {number} is not JSON ({error}); expected one object a line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{file}, line {number} is a JSON {type(row).__name__}; expected one object a line.")
    if _ESCAPED_SURROGATE.search(line) and not _is_text(row):
        raise DataError(f"{file}, line {number} has half of a surrogate pair (\\ud800 to \\udfff), which is no text.")
    return Row(f"{file}, line {number}", row)


def csv_row(file: Path, number: int, row: Mapping[Any, Any], names: Sequence[str]) -> Row:
    """The row that ends in a line of a CSV file, from what csv.DictReader makes of it.

    Raises DataError for too few or too many fields.
    """
    if None in row or None in row.values():
        found = len(names) + len(row.get(None, ())) - sum(value is None for value in row.values())
        raise DataError(
            f"{file}, line {number}: its fields are {found}, and the first line names {len(names)}. Each column needs "
            f"one, and text with commas in it needs quotes around it."
        )
    return Row(f"{file}, line {number}", {name: row[name] for name in names})


def _read_csv(file: Path, sample_by: str, columns: Sequence[str] | None) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 KiB
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        if rows.fieldnames is None:
            return
        try:
            for row in rows:
                yield csv_row(file, rows.line_num, row, rows.fieldnames)
        except csv.Error as error:
            raise DataError(f"{file}, line {rows.line_num} is not CSV: {error}.") from error


def _read_parquet(file: Path, sample_by: str, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        wanted = None if columns is None else [name for name in names if name in columns] or None
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            for values in batch.to_pylist():
                yield Row(f"{file}, row {number}", values)
                number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


_READERS: dict[str, Callable[[Path, str, Sequence[str] | None], Iterator[Row]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
ENDINGS = tuple(_READERS)


Place = tuple[int, int]
Placed = Iterator[tuple[Row, Place]]

START: Place = (0, 0)
LARGEST_DOCUMENT = 256 << 20
_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 64


def rows_from(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    """The rows of `file` from `place` on; `columns` and `sample_by` as in `read_rows`."""
    try:
        yield from _RESUMABLE_READERS[file.suffix.lower()](file, sample_by, columns, place)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}. Convert it, or leave it out.") from error


class _Lines:
    """The lines of a file from a place on; `place` is that of the line to come."""

    def __init__(self, file: Path, place: Place) -> None:
        self._file, self.place = file, place

    def __iter__(self) -> Iterator[str]:
        offset, number = self.place
        with self._file.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                offset, number = offset + len(line), number + 1
                text = line.removeprefix(_MARK) if number == 1 else line
                self.place = offset, number
                yield text.decode("utf-8")


def _text(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    if sample_by == "document":
        if place == START:
            require_small(file)
            text = file.read_text(encoding="utf-8-sig")
            yield Row(f"{file}, document 0", {"text": text}, is_text=True), (file.stat().st_size, 1)
        return
    lines, paragraph = _Lines(file, place), list[str]()
    for line in lines:
        text = line.replace("\r\n", "\n")
        if sample_by == "line":
            paragraph = [text]
        elif text.strip():
            paragraph.append(text)
            continue
        if paragraph:
            yield _row(file, lines.place[1], paragraph), lines.place
            paragraph = []
    if paragraph:
        yield _row(file, lines.place[1], paragraph), lines.place


def _row(file: Path, number: int, lines: list[str]) -> Row:
    return Row(f"{file}, line {number}", {"text": "".join(lines).rstrip("\n")}, is_text=True)


def check_documents(files: Sequence[Path], sample_by: str) -> None:
    """Raise DataError when one of `files` is a document that is too large to be held as a whole."""
    for file in files:
        if sample_by == "document" and _RESUMABLE_READERS[file.suffix.lower()] is _text:
            require_small(file)


def require_small(file: Path) -> None:
    """Raise DataError for a document that is too large."""
    if (size := file.stat().st_size) > LARGEST_DOCUMENT:
        raise DataError(
            f"{file} is one document of {format_size(size)}, and documents are tokenized as a whole (with "
            f"data.streaming up to {format_size(LARGEST_DOCUMENT)}). Set data.sample_by=paragraph or line."
        )


def _json_lines(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    lines = _Lines(file, place)
    for line in lines:
        if line.strip():
            yield json_row(file, lines.place[1], line), lines.place


def _csv(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    csv.field_size_limit(2**31 - 1)
    lines = _Lines(file, START)
    names = next(csv.reader(iter(lines)), None)
    if names is None:
        return
    lines = _Lines(file, lines.place if place == START else place)
    rows = csv.DictReader(lines, fieldnames=names, strict=True)
    try:
        for row in rows:
            yield csv_row(file, lines.place[1], row, names), lines.place
    except csv.Error as error:
        raise DataError(f"{file}, line {lines.place[1]} is not CSV: {error}.") from error


def _parquet(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            wanted = None if columns is None else [name for name in names if name in columns] or None
            number = 0
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if number + size <= place[1]:
                    number += size
                    continue
                for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=wanted):
                    skipped = min(max(place[1] - number, 0), batch.num_rows)
                    number += skipped
                    for values in batch.slice(skipped).to_pylist():
                        number += 1
                        yield Row(f"{file}, row {number - 1}", values), (0, number)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


_RESUMABLE_READERS: dict[str, Callable[[Path, str, Sequence[str] | None, Place], Placed]] = {
    ".txt": _text,
    ".md": _text,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".csv": _csv,
}
