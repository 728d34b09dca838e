"""Rows and documents, one at a time, out of local files or a hub data set.

Local files are never copied into an Arrow cache first: memory stays at one document, an error can name the file and
line, and the parent can look at the first rows without the second that importing `datasets` takes. Only hub names need
that library. How a file's format is read is in `readers.py`. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.sources.readers import ENDINGS, Row, read_rows, require_column, text_of
from fsdp_shard.errors import ConfigError, DataError

_READ_BYTES = 1 << 20


class Source(Protocol):
    """What is to be tokenized: rows in a fixed order, and what tells them from any others."""

    @property
    def name(self) -> str:
        """Setting and value, for messages."""

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Every row in order, with (at least) those of `columns` that it has."""

    def documents(self) -> Iterator[str]:
        """Every document in order; empty ones too, so that they can be counted."""

    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""

    def check(self) -> None:
        """Raise DataError when there is not one document with text in it."""


def open_source(config: DataConfig, held_out: bool) -> Source:
    """The source that `data.path` names (`data.eval_path` when `held_out`); raises DataError or ConfigError."""
    name = "data.eval_path" if held_out else f"{config.where}.path"
    given = config.eval_path if held_out else config.path
    if not given:
        raise DataError(f"{name} is empty; give a text file, a directory or the name of a data set on the hub.")
    path = Path(given).expanduser()
    if path.exists():
        _refuse_hub_settings(config, name, held_out)
        return FileSource(name, path, _files_of(path, name), config.text_column, config.sample_by)
    if not _may_be_hub_name(given):
        raise DataError(
            f"{name}={given}: there is no such file or directory. Give a text file, a directory or the name of a data "
            f"set on the hub."
        )
    split, streaming = (config.eval_split, False) if held_out else (config.split, config.streaming)
    return HubSource(name, given, config.subset, split, config.text_column, streaming)


@dataclass(frozen=True)
class FileSource:
    """Documents of local files, in the order of their names. `setting` is named in errors."""

    setting: str
    path: Path
    files: tuple[Path, ...]
    text_column: str
    sample_by: str

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        for file in self.files:
            yield from read_rows(file, self.sample_by, columns)

    def documents(self) -> Iterator[str]:
        return _documents(self, self.text_column)

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

    @property
    def name(self) -> str:
        return f"{self.setting}={self.path}"

    def check(self) -> None:
        _require_text(self, self.name)


@dataclass(frozen=True)
class HubSource:
    """Documents of a data set on the hub (or in the cache of the `datasets` library)."""

    setting: str
    hub_name: str
    subset: str | None
    split: str
    text_column: str
    streaming: bool = False

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        rows = self.load()
        if columns is not None and rows.column_names is not None:
            rows = rows.select_columns([name for name in rows.column_names if name in columns] or rows.column_names)
        for number, values in enumerate(rows):
            yield Row(f"{self.name}, row {number}", values)

    def documents(self) -> Iterator[str]:
        return _documents(self, self.text_column)

    def fingerprint(self) -> str:
        return json.dumps([self.text_column, self.load()._fingerprint])

    @property
    def name(self) -> str:
        return f"{self.setting}={self.hub_name}"

    def check(self) -> None:
        _require_text(self, self.name)

    def load(self) -> Any:
        """The data set of the `datasets` library; DataError when there is none."""
        import datasets

        try:
            return datasets.load_dataset(self.hub_name, self.subset, split=self.split, streaming=self.streaming)
        except Exception as error:  # the library raises many kinds, of its own and of its dependencies
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.name} is neither a file here nor a data set that can be loaded from the hub "
                f"(subset={self.subset}, split={self.split}): {reason}"
            ) from error


def _files_of(path: Path, setting: str) -> tuple[Path, ...]:
    known = ", ".join(ENDINGS)
    if path.is_dir():
        files = [file for file in _shown(path) if file.suffix.lower() in ENDINGS]
        if not files:
            raise DataError(f"{setting}={path} is a directory without text: no file in it ends in {known}.")
        return tuple(files)
    if not path.is_file():
        raise DataError(f"{setting}={path} is not a regular file.")
    if path.suffix.lower() not in ENDINGS:
        raise DataError(f"{setting}={path} has a format that is not known by its name; expected {known}.")
    return (path,)


def passed_over(given: str) -> str:
    """Which files of a directory are not read, for people; nothing where all are, or it is no directory."""
    path = Path(given).expanduser()
    others = [file for file in _shown(path) if file.suffix.lower() not in ENDINGS] if path.is_dir() else []
    if not others:
        return ""
    endings = sorted({file.suffix or "no ending" for file in others})
    some = ", ".join(endings[:5]) + (", ..." if len(endings) > 5 else "")
    return f"{given}: {len(others)} of its files are not read, by their names ({some})"


def _shown(directory: Path) -> list[Path]:
    """All files below it, in order, that are not hidden."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(directory).parts)]


def _may_be_hub_name(given: str) -> bool:
    """Hub names are `name` or `organization/name`; a known file ending means that a file was meant."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", given) is not None and Path(given).suffix.lower() not in ENDINGS


def _refuse_hub_settings(config: DataConfig, name: str, held_out: bool) -> None:
    split = (
        ("data.eval_split", config.eval_split, "validation")
        if held_out
        else (f"{config.where}.split", config.split, "train")
    )
    other = config.path if held_out else config.eval_path  # which may be on the hub, and is what a subset is for then
    is_for_other = bool(other) and not Path(str(other)).expanduser().exists()
    subset = (f"{config.where}.subset", None if is_for_other else config.subset, None)
    for setting, value, default in (split, subset):
        if value != default:
            raise ConfigError(
                f"{setting}={value} is for data sets on the hub, but {name} is a local path; leave it out."
            )


def _documents(source: Source, column: str) -> Iterator[str]:
    """The texts in `column`; rows of plain text files are documents, whatever their column is called."""
    for row in source.rows([column]):
        yield document_of(row, column)


def document_of(row: Row, column: str) -> str:
    """The text of a row; DataError when it has none."""
    if row.is_text:
        return str(row.values["text"])
    require_column(column, list(row.values), row.where, "data.text_column")
    return text_of(row.values[column], column, row.where, "data.text_column")


def _require_text(source: Source, what: str) -> None:
    num_documents = 0
    for document in source.documents():
        if document.strip():
            return
        num_documents += 1
    found = f"{num_documents} documents without text" if num_documents else "no documents"
    raise DataError(f"{what} is empty: {found} in it. Give a file with text in it.")
