"""Sources of rows: files, a hub dataset, or a saved dataset. Rows are read one at a time, from any position."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.sources import data_files as files
from fsdp_shard.data.sources.data_files import DataFile
from fsdp_shard.data.sources.datasets_private import fingerprint, quiet_datasets
from fsdp_shard.data.sources.readers import START, check_size, class_names, is_plain_text, read_rows
from fsdp_shard.data.sources.row import Header, Row
from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from fsdp_shard.utils import first_line, format_count, missing_file_system, redact

_HEAD_BYTES = 1 << 16

# Rows, each with a function that returns the position after it as JSON; call it before the next row.
ResumableRows = Iterator[tuple[Row, Callable[[], Any]]]


class Source(ABC):
    """Rows in a fixed order, with fingerprints that identify them.

    Attributes:
        name: Setting and value, for messages.
    """

    name: str

    @abstractmethod
    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        """Read the rows of an epoch.

        Args:
            columns: The required columns; rows may have others.
            start: A position returned by an earlier call; None is the beginning.
            epoch: Epoch number.
            seed: Seed of the file order, which changes with the epoch; None sorts files by name.
        """

    @abstractmethod
    def fingerprint(self) -> Any:
        """Return a JSON value that changes if the rows may have changed."""

    @abstractmethod
    def stream_fingerprint(self) -> Any:
        """Return a JSON value that identifies the rows as far as possible without reading all of them."""

    def has_rows(self, *, plain: bool) -> bool:
        """Return whether any rows are documents of plain text files if `plain`, else whether any have columns."""
        return not plain

    def class_names(self, column: str) -> Sequence[str]:
        """Return the names of the classes whose indices a column holds, as far as the data has them."""
        return ()

    def check_stream(self) -> None:  # noqa: B027  # most rows are small
        """Raise DataError if the rows are too large for streaming."""

    def empty(self, num_rows: int) -> DataError:
        """Return the error for data with nothing to learn in any of its `num_rows` rows."""
        rows = format_count(num_rows, "row")
        return DataError(f"{self.name} is empty: it has {rows}, none with anything to learn. Give a file with rows.")

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Read all rows in order."""
        return (row for row, _ in self.read(columns))


def open_source(config: DataConfig, held_out: bool) -> Source:
    """Open a data source.

    Args:
        config: The data settings, or those of one source of a mixture.
        held_out: Whether to open `eval_path` instead of `path`.

    Raises:
        DataError: There is no such file or directory, or its format is unknown.
        ConfigError: Settings for datasets on the hub are given for files.
    """
    setting = "data.eval_path" if held_out else f"{config.section}.path"
    given = config.eval_path if held_out else config.path
    if not given:
        raise DataError(f"{setting} is empty; give a text file, a directory or the name of a dataset on the hub.")
    name = f"{setting}={files.without_credentials(given)}"
    split, streaming = (config.eval_split, False) if held_out else (config.split, config.streaming)
    if _is_hub_name(given):
        return DatasetSource(name, given, config.subset, split, streaming)
    try:
        saved = files.saved_dataset(given)
        found = () if saved else tuple(files.find_files(given, setting)[0])
    except ImportError as error:
        raise missing_file_system(name, given, error) from error
    except Exception as error:
        if isinstance(error, DataError) or not files.is_url(given):
            raise
        raise DataError(f"{name} cannot be opened: {redact(first_line(error))}") from error
    _reject_hub_settings(config, setting, held_out, has_splits=saved == files.SAVED_SPLITS)
    if saved:
        return DatasetSource(name, given, None, split, streaming, is_saved=True)
    if not found:
        raise DataError(
            f"{name}: there is no such file or directory. Give a text file, a directory or the name of a dataset on "
            f"the hub."
        )
    return FileSource(name, found, config.sample_by)


def file_notes(given: str) -> list[str]:
    """Describe the files of a directory that are not read, and if they have several formats, those that are."""
    if _is_hub_name(given) or files.saved_dataset(given):
        return []
    found, others = files.find_files(given, "data.path")
    where, notes = files.without_credentials(given), []
    if others:
        extensions = sorted({Path(name).suffix or "no extension" for name in others})
        some = ", ".join(extensions[:5]) + (", ..." if len(extensions) > 5 else "")
        notes.append(f"{where}: {len(others)} of its files are skipped because of their extensions ({some})")
    formats = Counter(file.format[0] for file in found)
    if len(formats) > 1:
        listed = ", ".join(f"{count:,} {extension}" for extension, count in formats.most_common())
        notes.append(
            f"{where}: files of several formats are read ({listed}); a pattern such as *.jsonl reads one of them"
        )
    return notes


@dataclass(frozen=True)
class FileSource(Source):
    """Rows of files."""

    name: str
    files: tuple[DataFile, ...]
    sample_by: str

    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        first, *within = (0, *START) if start is None else self._valid_position(start)
        for number, file in enumerate(self._ordered(epoch, seed)[first:], start=first):
            position = (within[0], within[1]) if number == first else START
            for row, after in read_rows(file, self.sample_by, columns, position):
                yield row, lambda number=number, after=after: [number, *after]  # type: ignore[misc]  # mypy infers no lambda with defaults

    def fingerprint(self) -> Any:
        """The content of the files, and the settings that divide it into documents.

        A remote store's metadata of a file, such as its checksum or date, stands for its content.
        """
        head = {file: _HEAD_BYTES if files.is_url(file.address) else None for file in self.files}
        return [self.sample_by, [[file.format, file.info(), file.digest(head[file])] for file in self.files]]

    def stream_fingerprint(self) -> Any:
        """Names, sizes and first bytes of the files."""
        return [self.sample_by, [[file.name, file.info().get("size"), file.digest(_HEAD_BYTES)] for file in self.files]]

    def has_rows(self, *, plain: bool) -> bool:
        return any(is_plain_text(file) == plain for file in self.files)

    def class_names(self, column: str) -> Sequence[str]:
        """The class names in the first table."""
        table = next((file for file in self.files if file.format[0] in files.TABLES), None)
        return () if table is None else class_names(table, column)

    def check_stream(self) -> None:
        for file in self.files:
            check_size(file, self.sample_by)

    def _ordered(self, epoch: int, seed: int | None) -> Sequence[DataFile]:
        if seed is None:
            return self.files
        from fsdp_shard.data.sample_order import permutation  # numpy is slow to import

        return [self.files[index] for index in permutation(len(self.files), seed, epoch)]

    def _valid_position(self, start: Any) -> list[int]:
        numbers = start if isinstance(start, list) else []
        is_position = len(numbers) == 3 and all(type(number) is int and number >= 0 for number in numbers)
        if not is_position or numbers[0] >= len(self.files):
            raise CheckpointError(f"{start} is not a position in the {len(self.files)} files of {self.name}.")
        return numbers


@dataclass(frozen=True)
class DatasetSource(Source):
    """Rows of a hub dataset, in the cache of the `datasets` library, or, if `is_saved`, of one in a directory."""

    name: str
    given: str
    subset: str | None
    split: str
    streaming: bool = False
    is_saved: bool = False

    def read(self, columns: Sequence[str], start: Any = None, epoch: int = 0, seed: int | None = None) -> ResumableRows:
        data, number = self.load(), 0
        header = Header(self.name, data.column_names) if data.column_names else None
        if start is not None:
            if not isinstance(start, dict) or type(start.get("number")) is not int or "state" not in start:
                raise CheckpointError(f"{start} is not a position in {self.name}.")
            number = start["number"]
            data.load_state_dict(start["state"])
        elif not self.streaming:  # else the structure of the state would differ from earlier runs
            data = data.select_columns([name for name in data.column_names if name in columns] or data.column_names)
        for values in data:
            number += 1
            wanted = {name: values[name] for name in columns if name in values} or values
            row = Row(f"{self.name}, row {number - 1}", wanted, header=header)
            yield row, lambda number=number: {"number": number, "state": data.state_dict()}  # type: ignore[misc]  # the same

    def fingerprint(self) -> Any:
        return fingerprint(replace(self, streaming=False).load())

    def stream_fingerprint(self) -> Any:
        return self.fingerprint() if self.is_saved else [self.given, self.subset, self.split]

    def class_names(self, column: str) -> Sequence[str]:
        return tuple(getattr((self.load().features or {}).get(column), "names", ()))

    def load(self) -> Any:
        """Load the dataset with the `datasets` library; raise DataError if that fails."""
        import datasets

        # The name of a builder would read the files of its type below the current directory.
        if not self.is_saved and "." not in self.given and find_spec(f"datasets.packaged_modules.{self.given}"):
            raise DataError(f"{self.name} is a file format of the datasets library, not a dataset. Give files of it.")
        try:
            with quiet_datasets():
                if not self.is_saved:
                    return datasets.load_dataset(self.given, self.subset, split=self.split, streaming=self.streaming)
                found = datasets.load_from_disk(self.given)
        except Exception as error:  # the library raises many types, including those of its dependencies
            hub = f"that can be loaded from the hub (subset={self.subset}, split={self.split})"
            problem = (
                "is not a dataset that can be read" if self.is_saved else f"is neither a local file nor a dataset {hub}"
            )
            raise DataError(f"{self.name} {problem}: {redact(first_line(error))}") from error
        if isinstance(found, datasets.DatasetDict):
            if self.split not in found:
                raise DataError(f"{self.name} has no split {self.split!r}; it has {', '.join(found)}.")
            found = found[self.split]
        if found.format["type"] is not None or found.format["columns"] != found.column_names:
            found = found.with_format(None)  # a saved format may hide columns or return tensors
        return found.to_iterable_dataset() if self.streaming else found


def _is_hub_name(given: str) -> bool:
    """Hub names are `name` or `organization/name`; a name with the extension of a known format is a file."""
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", given) is not None
    is_file = files.has_known_extension(given) or given.lower().endswith(files.COMPRESSIONS)
    return is_name and not is_file and not Path(given).exists()


def _reject_hub_settings(config: DataConfig, name: str, held_out: bool, has_splits: bool) -> None:
    split = (
        ("data.eval_split", config.eval_split, "validation")
        if held_out
        else (f"{config.section}.split", config.split, config.default_split)
    )
    other = config.path if held_out else config.eval_path  # if that one is on the hub, the subset applies to it
    subset = (f"{config.section}.subset", None if _is_hub_name(other or "") else config.subset, None)
    for setting, value, default in (subset,) if has_splits else (split, subset):
        if value != default:
            raise ConfigError(
                f"{setting}={value} is for datasets on the hub, but {name} is a path of files; remove it."
            )
