"""Rows of a file one at a time from any place in it, each with the place after it: reading goes on there at once.

A place is [byte offset, number]: of lines in JSON lines, CSV and text, of rows in Parquet (where the offset is 0).
Nothing is read ahead but the file's own buffer, or a row group of Parquet. Formats are those of `readers.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fsdp_shard.data.readers import Row, csv_row, json_row
from fsdp_shard.errors import DataError
from fsdp_shard.sizes import format_size

Place = tuple[int, int]
Placed = Iterator[tuple[Row, Place]]

START: Place = (0, 0)
LARGEST_DOCUMENT = 256 << 20
_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 64


def rows_from(file: Path, sample_by: str, columns: Sequence[str] | None, place: Place) -> Placed:
    """The rows of `file` from `place` on; `columns` and `sample_by` as in `read_rows`."""
    try:
        yield from _READERS[file.suffix.lower()](file, sample_by, columns, place)
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
        if sample_by == "document" and _READERS[file.suffix.lower()] is _text:
            require_small(file)


def require_small(file: Path) -> None:
    """Raise DataError for a document that is too large."""
    if (size := file.stat().st_size) > LARGEST_DOCUMENT:
        raise DataError(
            f"{file} is one document of {format_size(size)}, and documents are tokenised as a whole (with "
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


_READERS: dict[str, Callable[[Path, str, Sequence[str] | None, Place], Placed]] = {
    ".txt": _text,
    ".md": _text,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".csv": _csv,
}
