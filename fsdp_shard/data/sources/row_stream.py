"""Rows of a source in the order of an epoch, from any place in it: local files, or a data set on the hub.

A place is JSON. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.sample_order import epoch_order
from fsdp_shard.data.sources.readers import Row, check_documents, rows_from
from fsdp_shard.data.sources.source import FileSource, HubSource, open_source
from fsdp_shard.errors import CheckpointError

_HEAD_BYTES = 1 << 16

# A row, and the place after it for whoever asks before the next row.
Placed = Iterator[tuple[Row, Callable[[], Any]]]


class RowStream(Protocol):
    """Rows that are read as they are asked for."""

    @property
    def name(self) -> str:
        """Setting and value, for messages."""

    def identity(self) -> Any:
        """As JSON: what tells these rows from others, as far as can be seen without reading all of them."""

    def rows(self, columns: Sequence[str], epoch: int, place: Any) -> Placed:
        """The rows of an epoch from `place` on; None is its beginning."""


@dataclass(frozen=True)
class FileStream:
    """Files one after the other, in another order each epoch where they are to be shuffled (`seed` is not None)."""

    source: FileSource
    seed: int | None

    @property
    def name(self) -> str:
        return self.source.name

    def identity(self) -> Any:
        """Names, sizes and beginnings of the files."""
        root = self.source.path
        return [self.source.sample_by, [[_below(file, root), file.stat().st_size, _head(file)] for file in self._files]]

    def rows(self, columns: Sequence[str], epoch: int, place: Any) -> Placed:
        first, *within = (0, 0, 0) if place is None else self._checked(place)
        num_files = len(self._files)
        order = range(num_files) if self.seed is None else epoch_order(self.seed, num_files, epoch).tolist()
        for position in range(first, num_files):
            start = (int(within[0]), int(within[1])) if position == first else (0, 0)
            file = self._files[order[position]]
            for row, after in rows_from(file, self.source.sample_by, columns, start):
                yield row, lambda position=position, after=after: [position, *after]  # type: ignore[misc]  # mypy infers no lambda with defaults

    def _checked(self, place: Any) -> list[int]:
        is_whole = (
            isinstance(place, list) and len(place) == 3 and all(type(part) is int and part >= 0 for part in place)
        )
        if not is_whole or place[0] >= len(self._files):
            raise CheckpointError(f"{place} is no place in the {len(self._files)} files of {self.name}.")
        return list(place)

    @property
    def _files(self) -> tuple[Path, ...]:
        return self.source.files


@dataclass(frozen=True)
class HubStream:
    """A data set of the `datasets` library, which keeps the place by itself."""

    source: HubSource

    @property
    def name(self) -> str:
        return self.source.name

    def identity(self) -> Any:
        return [self.source.hub_name, self.source.subset, self.source.split]

    def rows(self, columns: Sequence[str], epoch: int, place: Any) -> Placed:
        data = self.source.load()
        number = 0
        if place is not None:
            if not isinstance(place, dict) or type(place.get("number")) is not int or "state" not in place:
                raise CheckpointError(f"{place} is no place in {self.name}.")
            number = place["number"]
            data.load_state_dict(place["state"])
        for values in data:
            number += 1
            wanted = {name: values[name] for name in columns if name in values} or values
            row = Row(f"{self.name}, row {number - 1}", wanted)
            yield row, lambda number=number: {"number": number, "state": data.state_dict()}  # type: ignore[misc]  # the same


def open_rows(config: DataConfig, seed: int) -> RowStream:
    """The rows of `data.path`; raises DataError or ConfigError."""
    source = open_source(config, held_out=False)
    if isinstance(source, HubSource):
        return HubStream(source)
    assert isinstance(source, FileSource)
    check_documents(source.files, config.sample_by)
    return FileStream(source, seed if config.shuffle_buffer > 1 else None)


def _below(file: Path, root: Path) -> str:
    return file.name if file == root else file.relative_to(root).as_posix()


def _head(file: Path) -> str:
    with file.open("rb") as stream:
        return xxhash.xxh3_128_hexdigest(stream.read(_HEAD_BYTES))
