"""Rows to Arrow files, a batch at a time and in several processes, by `datasets.Dataset.map`.

The rows are read once, in this process, and those with something to learn are put into a file. A dataset of the places
of batches in it is then mapped: each process reads its batches there, and the dataset itself stays small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fsdp_shard.data.kinds.kind import Kind
from fsdp_shard.data.sources.datasets_private import quiet_datasets
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.errors import DataError
from fsdp_shard.utils import set_environment

if TYPE_CHECKING:
    import pyarrow

# Makes an Arrow table out of rows and their numbers.
Encode: TypeAlias = "Callable[[list[tuple[int, Row]]], pyarrow.Table]"

_BATCH_BYTES = 1 << 20  # enough for the tokenizer's threads, few enough for the memory


@dataclass
class StoredRows:
    """Rows in `file`, as JSON; batch i is at bytes `ends[i - 1]` to `ends[i]`."""

    file: Path
    ends: list[int] = field(default_factory=list)
    num_rows: int = 0
    num_usable: int = 0


def store_rows(source: Source, kind: Kind, file: Path, rows_at_once: int) -> StoredRows:
    """Write the rows that `kind` can use into `file`; no batch goes across a multiple of `rows_at_once`."""
    from tqdm import tqdm

    stored, size, group = StoredRows(file), 0, 0
    title, rows = f"reading {source.name}", source.rows(kind.columns)
    with file.open("wb") as out, tqdm(rows, title, unit=" rows", unit_scale=True, disable=None, leave=False) as bar:
        for number, row in enumerate(bar):
            stored.num_rows += 1
            if not kind.check_row(row):
                continue
            if size and (size >= _BATCH_BYTES or number // rows_at_once != group):
                stored.ends.append(out.tell())
                size = 0
            values = {name: row.values[name] for name in kind.columns if name in row.values} or row.values
            text = json.dumps([number, row.where, values, row.is_text], ensure_ascii=False, default=str)
            size += out.write(text.encode(errors="surrogatepass") + b"\n")  # as the name of a file may need it
            group, stored.num_usable = number // rows_at_once, stored.num_usable + 1
        if size:
            stored.ends.append(out.tell())
    return stored


def map_rows(stored: StoredRows, encode: Encode, schema: pyarrow.Schema, num_workers: int, name: str) -> list[Path]:
    """Encode batches of rows, with `num_workers` processes if that is more than 1.

    Args:
        stored: The rows.
        encode: Makes tables of them.
        schema: The schema of the tables.
        num_workers: Number of processes.
        name: What is encoded, for people.

    Returns:
        The Arrow files with the tables, in the order of the rows.

    Raises:
        DataError: A process was killed.
    """
    import datasets

    num_workers = min(num_workers, len(stored.ends))
    places = datasets.Dataset.from_dict({"start": [0, *stored.ends[:-1]], "stop": stored.ends})
    target = stored.file.with_name("tokens.arrow")
    try:
        with quiet_datasets(), _environment_of_map(num_workers):
            places.map(
                _EncodeBatch(str(stored.file), encode),
                batched=True,
                batch_size=1,
                remove_columns=places.column_names,
                features=datasets.Features.from_arrow_schema(schema),
                cache_file_name=str(target),
                new_fingerprint="tokens",
                num_proc=num_workers if num_workers > 1 else None,
                desc=f"tokenizing {name}",
            )
    except RuntimeError as error:
        if "died" not in str(error):
            raise
        raise DataError(
            f"One of the data.workers={num_workers} processes that tokenize was killed, possibly by the out-of-memory "
            f"killer; reduce it."
        ) from error
    return sorted(target.parent.glob("tokens*.arrow"))


def record_batches(files: Iterable[Path]) -> Iterator[pyarrow.RecordBatch]:
    """Read the tables in Arrow files, a part at a time."""
    import pyarrow

    for file in files:
        with pyarrow.OSFile(str(file)) as stream:  # mapped pages would count as memory
            yield from (batch for batch in pyarrow.ipc.open_stream(stream) if batch.num_rows)


@dataclass(frozen=True)
class _EncodeBatch:
    """Encodes a batch at a place in a file; plain data, as it is sent to other processes."""

    file: str
    encode: Encode

    def __call__(self, places: dict[str, list[int]]) -> pyarrow.Table:
        start, stop = places["start"][0], places["stop"][0]
        with open(self.file, "rb") as stream:
            stream.seek(start)
            rows = [json.loads(line) for line in stream.read(stop - start).splitlines()]
        return self.encode([(number, Row(*row)) for number, *row in rows])


@contextmanager
def _environment_of_map(num_workers: int) -> Iterator[None]:
    """What `map` with several processes sets and puts in place of `os.environ` is taken back."""
    if num_workers == 1:
        yield
        return
    environment = os.environ
    with set_environment({"TOKENIZERS_PARALLELISM": "false"}):
        try:
            yield
        finally:
            os.environ = environment  # noqa: B003  # the same object as before
