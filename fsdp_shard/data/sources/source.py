"""Where rows come from: local files, or a dataset on the hub. One row at a time, from any position in an epoch.

Local files are not copied into an Arrow cache: memory stays at one document, an error can name the file and the line,
and the first rows can be checked without importing `datasets`, which takes a second. Only hub names need that library.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.sources import datasets_private
from fsdp_shard.data.sources.readers import EXTENSIONS, START, Row, check_size, document_of, read_rows
from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from fsdp_shard.utils import first_line, format_count

_READ_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16

# Rows, each with a function that returns the position after it as JSON, to call before the next row.
ResumableRows = Iterator[tuple[Row, Callable[[], Any]]]


class Source(ABC):
    """Rows in a fixed order, and the fingerprints that identify them.

    Attributes:
        name: Setting and value, for messages.
        text_column: The column with the text of a document.
    """

    name: str
    text_column: str

    @abstractmethod
    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        """Read the rows of an epoch.

        Args:
            columns: The columns that are needed; rows may have others.
            start: A position that an earlier call returned; None is the beginning.
            epoch: Number of the epoch.
            seed: Seed of the order of the files, which changes with the epoch; None keeps that of their names.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes if the rows may have changed."""

    @abstractmethod
    def stream_fingerprint(self) -> Any:
        """Return, as JSON, what identifies the rows as far as that is known without reading all of them."""

    @abstractmethod
    def check_stream(self) -> None:
        """Raise DataError if the rows are too large for streaming."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Read all rows in order."""
        return (row for row, _ in self.read(columns))

    def documents(self) -> Iterator[str]:
        """Read the text of all rows in order, empty ones too."""
        return (document_of(row, self.text_column) for row in self.rows([self.text_column]))

    def check(self) -> None:
        """Raise DataError unless there is a document with text."""
        num_documents = 0
        for document in self.documents():
            if document.strip():
                return
            num_documents += 1
        found = f"{format_count(num_documents, 'document')} without text" if num_documents else "no documents"
        raise DataError(f"{self.name} is empty: it has {found}. Give a file with text.")


def open_source(config: DataConfig, held_out: bool) -> Source:
    """Open the source of some data.

    Args:
        config: The settings of the data, or of one source of a mixture.
        held_out: Whether to open `eval_path` instead of `path`.

    Raises:
        DataError: There is no such file or directory, or its format is unknown.
        ConfigError: Settings for datasets on the hub are given for a local path.
    """
    name = "data.eval_path" if held_out else f"{config.where}.path"
    given = config.eval_path if held_out else config.path
    if not given:
        raise DataError(f"{name} is empty; give a text file, a directory or the name of a dataset on the hub.")
    path = Path(given).expanduser()
    if path.exists():
        _reject_hub_settings(config, name, held_out)
        return FileSource(f"{name}={path}", path, _files_of(path, name), config.text_column, config.sample_by)
    if not _may_be_hub_name(given):
        raise DataError(
            f"{name}={given}: there is no such file or directory. Give a text file, a directory or the name of a "
            f"dataset on the hub."
        )
    split, streaming = (config.eval_split, False) if held_out else (config.split, config.streaming)
    return HubSource(f"{name}={given}", given, config.subset, split, config.text_column, streaming)


@dataclass(frozen=True)
class FileSource(Source):
    """Rows of local files: `path`, or the `files` in that directory."""

    name: str
    path: Path
    files: tuple[Path, ...]
    text_column: str
    sample_by: str

    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        first, *within = (0, *START) if start is None else self._checked(start)
        for number, file in enumerate(self._ordered(epoch, seed)[first:], start=first):
            position = (within[0], within[1]) if number == first else START
            for row, after in read_rows(file, self.sample_by, columns, position):
                yield row, lambda number=number, after=after: [number, *after]  # type: ignore[misc]  # mypy infers no lambda with defaults

    def fingerprint(self) -> str:
        """xxh3_128 of the content of the files and of what decides how they are cut into documents."""
        digest = xxhash.xxh3_128(json.dumps([self.text_column, self.sample_by]).encode())
        for file in self.files:
            digest.update(f"{file.suffix.lower()} {file.stat().st_size} ".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_READ_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()

    def stream_fingerprint(self) -> Any:
        """Names, sizes and first bytes of the files."""
        return [
            self.sample_by,
            [[self._relative(file), file.stat().st_size, _head_digest(file)] for file in self.files],
        ]

    def check_stream(self) -> None:
        for file in self.files:
            check_size(file, self.sample_by)

    def _ordered(self, epoch: int, seed: int | None) -> list[Path]:
        if seed is None:
            return list(self.files)
        from fsdp_shard.data.sample_order import epoch_order  # numpy is slow to import

        return [self.files[index] for index in epoch_order(seed, len(self.files), epoch)]

    def _relative(self, file: Path) -> str:
        return file.name if file == self.path else file.relative_to(self.path).as_posix()

    def _checked(self, start: Any) -> list[int]:
        numbers = start if isinstance(start, list) else []
        is_position = len(numbers) == 3 and all(type(number) is int and number >= 0 for number in numbers)
        if not is_position or numbers[0] >= len(self.files):
            raise CheckpointError(f"{start} is not a position in the {len(self.files)} files of {self.name}.")
        return numbers


@dataclass(frozen=True)
class HubSource(Source):
    """Rows of a dataset on the hub, or in the cache of the `datasets` library."""

    name: str
    hub_name: str
    subset: str | None
    split: str
    text_column: str
    streaming: bool = False

    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        data, number = self.load(), 0
        if start is not None:
            if not isinstance(start, dict) or type(start.get("number")) is not int or "state" not in start:
                raise CheckpointError(f"{start} is not a position in {self.name}.")
            number = start["number"]
            data.load_state_dict(start["state"])
        elif not self.streaming:  # else the state would have another structure than that of earlier runs
            data = data.select_columns([name for name in data.column_names if name in columns] or data.column_names)
        for values in data:
            number += 1
            wanted = {name: values[name] for name in columns if name in values} or values
            row = Row(f"{self.name}, row {number - 1}", wanted)
            yield row, lambda number=number: {"number": number, "state": data.state_dict()}  # type: ignore[misc]  # the same

    def fingerprint(self) -> str:
        return json.dumps([self.text_column, datasets_private.fingerprint(self.load())])

    def stream_fingerprint(self) -> Any:
        return [self.hub_name, self.subset, self.split]

    def check_stream(self) -> None:
        """Rows on the hub are not checked."""

    def load(self) -> Any:
        """Load the dataset with the `datasets` library; raise DataError if that fails."""
        import datasets

        try:
            return datasets.load_dataset(self.hub_name, self.subset, split=self.split, streaming=self.streaming)
        except Exception as error:  # the library raises many types, of its own and of its dependencies
            raise DataError(
                f"{self.name} is neither a local file nor a dataset that can be loaded from the hub "
                f"(subset={self.subset}, split={self.split}): {first_line(error)}"
            ) from error


def _head_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return xxhash.xxh3_128_hexdigest(stream.read(_HEAD_BYTES))


def _files_of(path: Path, setting: str) -> tuple[Path, ...]:
    known = ", ".join(EXTENSIONS)
    if path.is_dir():
        files = [file for file in _visible_files(path) if file.suffix.lower() in EXTENSIONS]
        if not files:
            raise DataError(f"{setting}={path} is a directory without text: no file in it has the extension {known}.")
        return tuple(files)
    if not path.is_file():
        raise DataError(f"{setting}={path} is not a regular file.")
    if path.suffix.lower() not in EXTENSIONS:
        raise DataError(f"{setting}={path} has an unknown extension; expected {known}.")
    return (path,)


def skipped_files(given: str) -> str:
    """Describe the files of a directory that are not read; return an empty text if there are none."""
    path = Path(given).expanduser()
    others = [file for file in _visible_files(path) if file.suffix.lower() not in EXTENSIONS] if path.is_dir() else []
    if not others:
        return ""
    extensions = sorted({file.suffix or "no extension" for file in others})
    some = ", ".join(extensions[:5]) + (", ..." if len(extensions) > 5 else "")
    return f"{given}: {len(others)} of its files are skipped because of their extensions ({some})"


def _visible_files(directory: Path) -> list[Path]:
    """Return all files below a directory that are not hidden, in order."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(directory).parts)]


def _may_be_hub_name(given: str) -> bool:
    """Hub names are `name` or `organization/name`; with the extension of a known format, a file is meant."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", given) is not None and Path(given).suffix.lower() not in EXTENSIONS


def _reject_hub_settings(config: DataConfig, name: str, held_out: bool) -> None:
    split = (
        ("data.eval_split", config.eval_split, "validation")
        if held_out
        else (f"{config.where}.split", config.split, "train")
    )
    other = config.path if held_out else config.eval_path  # if that is on the hub, the subset is for it
    is_for_other = bool(other) and not Path(str(other)).expanduser().exists()
    subset = (f"{config.where}.subset", None if is_for_other else config.subset, None)
    for setting, value, default in (split, subset):
        if value != default:
            raise ConfigError(
                f"{setting}={value} is for datasets on the hub, but {name} is a local path; leave it out."
            )
