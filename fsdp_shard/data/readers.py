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
from fsdp_shard.settings import nearest


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
