"""Reads the rows of a file one at a time and from any position; the extension defines the format.

Text formats are read as lines and parsed with the standard library. For JSON and CSV, the builders of `datasets` infer
one schema over all rows, which adds nulls to messages that lack a key, changes numbers in CSV files, and does not
identify a bad row. Tables have a schema, and are read with `datasets`.
"""

import csv
import io
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import escape
from typing import Any, TextIO

from fsdp_shard.data.sources.data_files import LINES, TABLES, DataFile, is_url
from fsdp_shard.data.sources.datasets_private import quiet_datasets
from fsdp_shard.data.sources.row import Header, Row
from fsdp_shard.errors import DataError
from fsdp_shard.utils import first_line, format_size, other_content, redact

# Byte offset in the decompressed file, and number of lines before it; for tables and JSON arrays, 0 and the number of
# rows.
Position = tuple[int, int]
START: Position = (0, 0)

# Limits for bytes of a document and characters of a line or value: a small compressed file may expand to any size.
LARGEST_DOCUMENT = 256 << 20
_CSV_LIMIT = threading.Lock()  # of a field, 128 KiB: it is global to the process, and streams are read in threads
_ROWS_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 1 << 20
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLANKS = re.compile(r"[ \t\r\n]*")
_COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}  # first bytes of their files


Rows = Iterator[tuple[Row, Position]]


def read_rows(file: DataFile, sample_by: str, columns: Sequence[str], start: Position = START) -> Rows:
    """Read the rows of a file.

    Args:
        file: The file; its extension gives the format.
        sample_by: The unit of one row in a plain text file: document, paragraph or line.
        columns: The required columns; rows may have others.
        start: The start position, as returned with an earlier row.

    Yields:
        Each row, with the position after it.

    Raises:
        DataError: The file's format does not match its extension, or the file cannot be read.
    """
    position = start
    try:
        for row, position in _READERS[file.format[0]](file, sample_by, columns, start):
            yield row, position
    except Exception as error:
        extension, compression = file.format
        is_table = extension in TABLES
        is_foreign = is_table or is_url(file.address) or isinstance(error, (OSError, EOFError, zlib.error))
        if isinstance(error, DataError) or not is_foreign:
            raise
        after = f" after {'row' if is_table else 'line'} {position[1]}" if position[1] else ""
        how = f"decompressed as {compression}" if compression else "read"
        how += f" as {extension[1:].capitalize()}" if is_table else ""
        raise DataError(f"{file} cannot be {how}{after}: {redact(first_line(error))}") from error


def is_plain_text(file: DataFile) -> bool:
    """Return whether the rows of `file` are documents, without columns."""
    return _READERS[file.format[0]] is _read_text


def check_size(file: DataFile, sample_by: str) -> None:
    """Raise DataError if `file` is a single document that is too large for streaming."""
    if sample_by == "document" and is_plain_text(file) and (_size(file) or 0) > LARGEST_DOCUMENT:
        raise too_large(str(file))


class _Lines:
    """The lines of a UTF-8 file from a position on; `position` is the one after the last line read."""

    def __init__(self, file: DataFile, position: Position) -> None:
        self._file, self.position = file, position

    def __iter__(self) -> Iterator[str]:
        offset, number = self.position
        with self._file.open(offset) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as stream:
            try:
                while line := stream.readline(LARGEST_DOCUMENT):
                    offset, number = offset + len(line.encode()), number + 1
                    self.position = offset, number
                    if len(line) == LARGEST_DOCUMENT:
                        raise too_large(self.where)
                    yield line.removeprefix("\ufeff") if number == 1 else line
            except UnicodeDecodeError as error:  # in the text after the current line
                raise _not_text(self._file, error, number) from error

    @property
    def where(self) -> str:
        return f"{self._file}, line {self.position[1]}"


def too_large(where: str) -> DataError:
    """Return the error for an item at `where` that is too large for memory."""
    return DataError(
        f"{where} has more than {format_size(LARGEST_DOCUMENT)}, which is too much for one row of a stream or out of a "
        f"compressed file. Give smaller rows; for plain text, set data.sample_by=paragraph or line."
    )


def _not_text(file: DataFile, error: UnicodeDecodeError, num_lines: int) -> DataError:
    found: bytes = error.object
    name = _COMPRESSED.get(found[:2]) if not num_lines else None
    advice = f"It begins as a {name} file: add {name} to its name." if name else "Convert it to UTF-8, or remove it."
    line = num_lines + found.count(b"\n", 0, error.start) + 1
    return DataError(f"{file}, line {line} is not UTF-8 text ({error.reason}). {advice}")


def _read_text(file: DataFile, sample_by: str, columns: Sequence[str], start: Position) -> Rows:
    if sample_by == "document":
        if start == START:
            yield Row(f"{file}, document 0", {"text": _document(file)}, is_text=True), (_size(file) or 0, 1)
        return
    lines, paragraph, size = _Lines(file, start), list[str](), 0
    for line in lines:
        text = line.rstrip("\r\n")
        if sample_by == "line":
            paragraph = [text]
        elif text.strip():
            paragraph.append(text)
            if (size := size + len(text)) > LARGEST_DOCUMENT:
                raise too_large(lines.where)
            continue
        if paragraph:
            yield Row(lines.where, {"text": "\n".join(paragraph)}, is_text=True), lines.position
            paragraph, size = [], 0
    if paragraph:
        yield Row(lines.where, {"text": "\n".join(paragraph)}, is_text=True), lines.position


def _size(file: DataFile) -> int | None:
    """Return the size of the content in bytes, if it is known without reading."""
    return None if file.format[1] else file.info().get("size")


def _document(file: DataFile) -> str:
    is_known = _size(file) is not None
    with file.open() as stream:
        content = stream.read(-1 if is_known else LARGEST_DOCUMENT + 1)
    if len(content) > LARGEST_DOCUMENT and not is_known:
        raise too_large(str(file))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(file, error, 0) from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _read_json_lines(file: DataFile, sample_by: str, columns: Sequence[str], start: Position) -> Rows:
    lines = _Lines(file, start)
    for line in lines:
        if line.strip():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:  # integers of thousands of digits, a thousand levels
                if (found := other_content(line.encode())) is not None:
                    raise DataError(f"{file} has no rows: it is {found}.") from error
                expected = (
                    "an array of objects, or one per line" if file.format[0] == ".json" else "one object per line"
                )
                raise DataError(f"{lines.where} is not JSON ({error}); expected {expected}.") from error
            yield Row(lines.where, _valid_object(values, line, lines.where)), lines.position


def _read_json(file: DataFile, sample_by: str, columns: Sequence[str], start: Position) -> Rows:
    """Read an array of objects, or one object per line."""
    with file.open() as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as stream:
        try:
            while (text := stream.read(_CHARACTERS_AT_ONCE)) and not text.strip():
                pass
            if text.lstrip().startswith("["):
                for number, (values, source) in enumerate(_elements(text, stream, str(file)), start=1):
                    where = f"{file}, row {number - 1}"
                    if number > start[1]:
                        yield Row(where, _valid_object(values, source, where)), (0, number)
                return
        except UnicodeDecodeError as error:
            raise _not_text(file, error, 0) from error
    yield from _read_json_lines(file, sample_by, columns, start)


def _elements(text: str, stream: TextIO, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the elements of an array that begins with `text`, and their source text, with only a part in memory."""
    decode = json.JSONDecoder().raw_decode
    at, number, separator = 0, 0, "["

    def read_more() -> bool:
        nonlocal text, at
        text, at, before = text[at:], 0, len(text) - at
        if before > LARGEST_DOCUMENT:
            raise too_large(f"{name}, row {number}")
        text += stream.read(max(_CHARACTERS_AT_ONCE, before))
        return before < len(text)

    def next_mark() -> str:
        nonlocal at
        while (at := _BLANKS.match(text, at).end()) == len(text) and read_more():  # type: ignore[union-attr]  # it always matches
            pass
        return text[at : at + 1]

    while (mark := next_mark()) == separator:
        at += 1
        if next_mark() == "]" and separator == "[":
            break
        while True:
            try:
                values, end = decode(text, at)
                break
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or not read_more():
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise DataError(f"{name}, row {number} is not JSON ({reason}).") from error
        yield values, text[at:end]
        at, number, separator = end, number + 1, ","
    if next_mark() != "]":
        raise DataError(f"{name}: after row {number - 1} comes {mark!r} instead of a comma or the end of the array.")
    at += 1
    if next_mark():
        raise DataError(f"{name}: after row {number - 1}, the array ends before the file.")


def _valid_object(values: Any, source: str, where: str) -> dict[str, Any]:
    """Return `values`, parsed from `source`; raise DataError unless they are an object with valid text."""
    if not isinstance(values, dict):
        raise DataError(f"{where} is a JSON {type(values).__name__}; expected one object per line.")
    if _ESCAPED_SURROGATE.search(source) and not _is_text(values):
        raise DataError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not valid text.")
    return values


def _is_text(values: Mapping[str, Any]) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_csv(file: DataFile, sample_by: str, columns: Sequence[str], start: Position) -> Rows:
    delimiter, delimiters = ("\t", "tabs") if file.format[0] == ".tsv" else (",", "commas")
    lines = _Lines(file, START)
    rows = _csv_rows(lines, delimiter)
    if (names := next(rows, None)) is None:
        return
    header = Header(f"{lines.where} (the header)", names)
    if doubled := [name for name in columns if names.count(name) > 1]:
        raise DataError(f"{header.where} names the column {doubled[0]!r} twice; rename one of them.")
    if start != START:
        lines = _Lines(file, start)
        rows = _csv_rows(lines, delimiter)
    for fields in rows:
        if len(fields) != len(names):
            raise DataError(
                f"{lines.where}: it has {len(fields)} fields, but {header.where} names {len(names)}. Each column needs "
                f"a field, and text with {delimiters} needs quotes."
            )
        yield Row(lines.where, dict(zip(names, fields, strict=True)), header=header), lines.position


def _csv_rows(lines: _Lines, delimiter: str) -> Iterator[list[str]]:
    """Yield the fields of each row that is not blank."""
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    while True:
        begin = lines.position[1] + 1
        with _CSV_LIMIT:
            limit = csv.field_size_limit(LARGEST_DOCUMENT)
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{lines.where} is not CSV: {error} in the row that begins in line {begin}.") from error
            finally:
                csv.field_size_limit(limit)
        if fields is None:
            return
        if fields:
            yield fields


def class_names(file: DataFile, column: str) -> Sequence[str]:
    """Return the names of the classes whose indices a table column holds, if the table has them."""
    with quiet_datasets():
        return tuple(getattr(_load_table(file).features.get(column), "names", ()))


def _load_table(file: DataFile, **options: Any) -> Any:
    import datasets

    files = [escape(file.address)]
    return datasets.load_dataset(file.format[0][1:], data_files=files, split="train", streaming=True, **options)


def _read_table(file: DataFile, sample_by: str, columns: Sequence[str], start: Position) -> Rows:
    with quiet_datasets():
        batches = {"batch_size": _ROWS_AT_ONCE} if file.format[0] == ".parquet" else {}
        table = _load_table(file, **batches)
        names = list(table.features)
        if wanted := [name for name in names if name in columns]:
            table = _load_table(file, **batches, columns=wanted) if batches else table.select_columns(wanted)
        rows = table.skip(start[1]).iter(_ROWS_AT_ONCE)
    header, number = Header(str(file), names), start[1]
    while True:
        with quiet_datasets():
            found = next(rows, None)
        if found is None:
            return
        for values in zip(*found.values(), strict=True):
            number += 1
            row = dict(zip(found, values, strict=True))
            yield Row(f"{file}, row {number - 1}", row, header=header), (0, number)


_READERS: dict[str, Callable[[DataFile, str, Sequence[str], Position], Rows]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
}
assert _READERS.keys() == {*LINES, *TABLES}
