"""Documents, one string at a time, out of files of several formats or a hub data set.

Local files are read by the standard library (Parquet: by pyarrow) and never copied into an Arrow cache first: memory
stays at one document, an error can name the file and line, and the parent can look at the first rows without the
second that importing `datasets` takes. Only hub names need that library. Knows nothing of tokens.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp_shard.data.base import DataConfig
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.settings import nearest

_READ_BYTES = 1 << 20


class Source(Protocol):
    """Text to be tokenised: documents in a fixed order, and what tells this text from any other."""

    def documents(self) -> Iterator[str]:
        """Every document in order; empty ones too, so that they can be counted."""

    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""

    def check(self) -> None:
        """Raise DataError when there is not one document with text in it."""


def open_source(config: DataConfig, held_out: bool) -> Source:
    """The source that `data.path` names (`data.eval_path` when `held_out`); raises DataError or ConfigError."""
    name = "data.eval_path" if held_out else "data.path"
    given = config.eval_path if held_out else config.path
    assert given is not None
    path = Path(given).expanduser()
    if path.exists():
        _refuse_hub_settings(config, name, held_out)
        return FileSource(name, path, _files_of(path, name), config.text_column, config.sample_by)
    if not _may_be_hub_name(given):
        raise DataError(
            f"{name}={given}: there is no such file or directory. Give a text file, a directory or the name of a data "
            f"set on the hub."
        )
    return HubSource(name, given, config.subset, config.eval_split if held_out else config.split, config.text_column)


@dataclass(frozen=True)
class FileSource:
    """Documents of local files, in the order of their names. `setting` is named in errors."""

    setting: str
    path: Path
    files: tuple[Path, ...]
    text_column: str
    sample_by: str

    def documents(self) -> Iterator[str]:
        for file in self.files:
            try:
                yield from _READERS[file.suffix.lower()](file, self)
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not UTF-8 text: {error}. Convert it, or leave it out.") from error

    def fingerprint(self) -> str:
        """xxh3_128 of the content of the files and of what decides how they are cut into documents."""
        import xxhash

        digest = xxhash.xxh3_128(json.dumps([self.text_column, self.sample_by]).encode())
        for file in self.files:
            digest.update(f"{file.suffix.lower()} {file.stat().st_size} ".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_READ_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()

    def check(self) -> None:
        _require_text(self, f"{self.setting}={self.path}")


@dataclass(frozen=True)
class HubSource:
    """Documents of a data set on the hub (or in the cache of the `datasets` library)."""

    setting: str
    name: str
    subset: str | None
    split: str
    text_column: str

    def documents(self) -> Iterator[str]:
        rows = self._load()
        _require_column(self.text_column, rows.column_names, f"{self.setting}={self.name}")
        for number, value in enumerate(rows[self.text_column]):
            yield _text_of(value, self.text_column, f"{self.setting}={self.name}, row {number}")

    def fingerprint(self) -> str:
        return json.dumps([self.text_column, self._load()._fingerprint])

    def check(self) -> None:
        _require_text(self, f"{self.setting}={self.name}")

    def _load(self) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.name, self.subset, split=self.split)
        except Exception as error:  # the library raises many kinds, of its own and of its dependencies
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.setting}={self.name} is neither a file here nor a data set that can be loaded from the hub "
                f"(subset={self.subset}, split={self.split}): {reason}"
            ) from error


def _files_of(path: Path, setting: str) -> tuple[Path, ...]:
    known = ", ".join(_READERS)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _READERS and file.is_file())
        if not files:
            raise DataError(f"{setting}={path} is a directory without text: no file in it ends in {known}.")
        return tuple(files)
    if not path.is_file():
        raise DataError(f"{setting}={path} is not a regular file.")
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{setting}={path} has a format that is not known by its name; expected {known}.")
    return (path,)


def _may_be_hub_name(given: str) -> bool:
    """Hub names are `name` or `organisation/name`; a known file ending means that a file was meant."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", given) is not None and Path(given).suffix.lower() not in _READERS


def _refuse_hub_settings(config: DataConfig, name: str, held_out: bool) -> None:
    split = ("data.eval_split", config.eval_split, "validation") if held_out else ("data.split", config.split, "train")
    for setting, value, default in (split, ("data.subset", config.subset, None)):
        if value != default:
            raise ConfigError(
                f"{setting}={value} is for data sets on the hub, but {name} is a local path; leave it out."
            )


def _require_text(source: Source, what: str) -> None:
    num_documents = 0
    for document in source.documents():
        if document.strip():
            return
        num_documents += 1
    found = f"{num_documents} documents without text" if num_documents else "no documents"
    raise DataError(f"{what} is empty: {found} in it. Give a file with text in it.")


def _require_column(column: str, columns: list[str], what: str) -> None:
    if column not in columns:
        raise DataError(
            f"{what} has no column {column!r}; it has {', '.join(columns) or 'none'}{nearest(column, columns)}. "
            f"Set data.text_column."
        )


def _text_of(value: object, column: str, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{what}: column {column!r} holds {type(value).__name__}, expected text. Set data.text_column.")
    return value


def _read_text(file: Path, source: FileSource) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as stream:
        if source.sample_by == "line":
            yield from (line.rstrip("\n") for line in stream)
        elif source.sample_by == "paragraph":
            yield from _paragraphs(stream)
        else:
            yield stream.read()


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).rstrip("\n")
            paragraph = []
    if paragraph:
        yield "".join(paragraph).rstrip("\n")


def _read_json_lines(file: Path, source: FileSource) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, line {number} is not JSON ({error}); expected one object a line.") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number} is a JSON {type(row).__name__}; expected one object a line.")
            _require_column(source.text_column, list(row), f"{file}, line {number}")
            yield _text_of(row[source.text_column], source.text_column, f"{file}, line {number}")


def _read_csv(file: Path, source: FileSource) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 KiB
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream)
        if rows.fieldnames is None:
            return
        _require_column(source.text_column, list(rows.fieldnames), str(file))
        try:
            for row in rows:
                yield _text_of(row[source.text_column], source.text_column, f"{file}, line {rows.line_num}")
        except csv.Error as error:
            raise DataError(f"{file}, line {rows.line_num} is not CSV: {error}.") from error


def _read_parquet(file: Path, source: FileSource) -> Iterator[str]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        _require_column(source.text_column, table.schema_arrow.names, str(file))
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[source.text_column]):
            for value in batch.column(0).to_pylist():
                yield _text_of(value, source.text_column, f"{file}, row {number}")
                number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


_READERS: dict[str, Callable[[Path, FileSource], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
