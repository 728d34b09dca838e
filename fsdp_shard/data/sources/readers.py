"""Rows of a file, one at a time and from any position: plain text, JSON Lines, CSV, Parquet, by the file extension.

The standard library reads all of them but Parquet.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_size, nearest

# Byte offset and number of lines before it; in a Parquet file 0 and the number of rows.
Position = tuple[int, int]
START: Position = (0, 0)

LARGEST_DOCUMENT = 256 << 20  # bytes
_ROWS_AT_ONCE = 64
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Row(NamedTuple):
    """Values by column, and where the row is, for messages. A document of a plain text file has only `text`."""

    where: str
    values: dict[str, Any]
    is_text: bool = False


Rows = Iterator[tuple[Row, Position]]


def read_rows(file: Path, sample_by: str, columns: Sequence[str] | None, start: Position = START) -> Rows:
    """Read the rows of a file.

    Args:
        file: The file; its extension tells the format.
        sample_by: What one row of a plain text file is: document, paragraph or line.
        columns: The columns of a Parquet file to read; None reads all of them.
        start: The position to start from, as returned with an earlier row.

    Yields:
        Each row, with the position after it.

    Raises:
        DataError: The file does not have the format that its extension names.
    """
    try:
        yield from _READERS[file.suffix.lower()](file, sample_by, columns, start)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}. Convert it, or remove it.") from error


def check_size(file: Path, sample_by: str) -> None:
    """Raise DataError if `file` is a single document that is too large for streaming."""
    is_document = sample_by == "document" and _READERS[file.suffix.lower()] is _read_text
    if is_document and (size := file.stat().st_size) > LARGEST_DOCUMENT:
        raise DataError(
            f"{file} is one document of {format_size(size)}, but a document is tokenized at once (with data.streaming "
            f"up to {format_size(LARGEST_DOCUMENT)}). Set data.sample_by=paragraph or line."
        )


def require_column(column: str, columns: Sequence[str], where: str, setting: str) -> None:
    """Raise DataError unless `column` is one of `columns`."""
    if column not in columns:
        raise DataError(
            f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}{nearest(column, columns)}. "
            f"Set {setting}."
        )


def text_of(value: object, column: str, where: str, setting: str) -> str:
    """Return `value` as text, null as the empty text; raise DataError for any other type."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, expected text. Set {setting}.")
    return value


def document_of(row: Row, column: str) -> str:
    """Return the text of a row: that in `column`, or the document of a plain text file; raise DataError without one."""
    if row.is_text:
        return str(row.values["text"])
    require_column(column, list(row.values), row.where, "data.text_column")
    return text_of(row.values[column], column, row.where, "data.text_column")


class _Lines:
    """The lines of a UTF-8 file from a position on; `position` is that after the last line."""

    def __init__(self, file: Path, position: Position) -> None:
        self._file, self.position = file, position

    def __iter__(self) -> Iterator[str]:
        offset, number = self.position
        with self._file.open("rb") as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as stream:
            binary.seek(offset)
            for line in stream:
                offset, number = offset + len(line.encode()), number + 1
                self.position = offset, number
                yield line.removeprefix("\ufeff") if number == 1 else line

    @property
    def where(self) -> str:
        return f"{self._file}, line {self.position[1]}"


def _read_text(file: Path, sample_by: str, columns: Sequence[str] | None, start: Position) -> Rows:
    if sample_by == "document":
        if start == START:
            text = file.read_text(encoding="utf-8-sig")
            yield Row(f"{file}, document 0", {"text": text}, is_text=True), (file.stat().st_size, 1)
        return
    lines, paragraph = _Lines(file, start), list[str]()
    for line in lines:
        text = line.rstrip("\r\n")
        if sample_by == "line":
            paragraph = [text]
        elif text.strip():
            paragraph.append(text)
            continue
        if paragraph:
            yield Row(lines.where, {"text": "\n".join(paragraph)}, is_text=True), lines.position
            paragraph = []
    if paragraph:
        yield Row(lines.where, {"text": "\n".join(paragraph)}, is_text=True), lines.position


def _read_json_lines(file: Path, sample_by: str, columns: Sequence[str] | None, start: Position) -> Rows:
    lines = _Lines(file, start)
    for line in lines:
        if line.strip():
            yield Row(lines.where, _json_object(line, lines.where)), lines.position


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, a thousand levels
        raise DataError(f"{where} is not JSON ({error}); expected one object per line.") from error
    if not isinstance(values, dict):
        raise DataError(f"{where} is a JSON {type(values).__name__}; expected one object per line.")
    if _ESCAPED_SURROGATE.search(line) and not _is_text(values):
        raise DataError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not valid text.")
    return values


def _is_text(values: Mapping[str, Any]) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_csv(file: Path, sample_by: str, columns: Sequence[str] | None, start: Position) -> Rows:
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB
    lines = _Lines(file, START)
    try:
        names = next(csv.reader(iter(lines), strict=True), None)
        if names is None:
            return
        lines = _Lines(file, lines.position if start == START else start)
        for row in csv.DictReader(lines, fieldnames=names, strict=True):
            yield Row(lines.where, _csv_values(row, names, lines.where)), lines.position
    except csv.Error as error:
        raise DataError(f"{lines.where} is not CSV: {error}.") from error


def _csv_values(row: Mapping[Any, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    if None in row or None in row.values():
        found = len(names) + len(row.get(None, ())) - sum(value is None for value in row.values())
        raise DataError(
            f"{where}: it has {found} fields, but the first line names {len(names)}. Each column needs a field, and "
            f"text with commas needs quotes."
        )
    return {name: row[name] for name in names}


def _read_parquet(file: Path, sample_by: str, columns: Sequence[str] | None, start: Position) -> Rows:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            wanted = None if columns is None else [name for name in names if name in columns] or None
            number = 0
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if number + size <= start[1]:
                    number += size
                    continue
                for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=wanted):
                    skipped = min(max(start[1] - number, 0), batch.num_rows)
                    number += skipped
                    for values in batch.slice(skipped).to_pylist():
                        number += 1
                        yield Row(f"{file}, row {number - 1}", values), (0, number)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


_READERS: dict[str, Callable[[Path, str, Sequence[str] | None, Position], Rows]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
EXTENSIONS = tuple(_READERS)
