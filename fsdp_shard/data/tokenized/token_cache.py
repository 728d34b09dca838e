"""The cache of tokenized rows: Arrow files that `datasets.Dataset.map` writes, in a directory for each source.

The name of the directory identifies the rows, the tokenizer and the kind of examples, but not the length of windows:
rows are not truncated.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fsdp_shard.data.kinds.kind import Kind, Tokenizer
from fsdp_shard.data.sources.datasets_private import quiet_datasets
from fsdp_shard.data.sources.row import Header, Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized.encoder import Encoder
from fsdp_shard.data.tokenized.token_file import TokenFile, summarize
from fsdp_shard.errors import DataError, one_line
from fsdp_shard.utils import atomic_directory, json_digest, set_environment

if TYPE_CHECKING:
    import pyarrow

# Rows tokenized in one call: enough for the tokenizer's threads, few enough for the memory.
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 20
_OF_JSON = (str, int, float, list, dict, type(None))  # bytes, dates and decimals are not
_LEFTOVER_SECONDS = 24 * 3600  # a run writes more often than that


def tokenize(source: Source, kind: Kind, tokenizer: Tokenizer, cache_dir: Path, num_workers: int = 1) -> TokenFile:
    """Tokenize the rows of a source, unless they are cached.

    Args:
        source: The rows.
        kind: How rows become examples, or `RunningText`.
        tokenizer: The tokenizer.
        cache_dir: Directory of the cache.
        num_workers: Processes that tokenize.

    Raises:
        DataError: There is nothing to train on, the tokenizer is unusable, or the cache cannot be written.
    """
    kind.check_tokenizer(tokenizer)
    encoder = Encoder(kind, tokenizer)
    directory = cache_dir / json_digest([source.fingerprint(), *encoder.fingerprint()])
    if (known := TokenFile.read(directory)) is not None:
        return known
    with cache_errors(directory):
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(cache_dir)
        with atomic_directory(directory) as temporary:
            files = _write(temporary, source, encoder, num_workers)
            summarize(files, encoder, source.name).write_meta()
            if directory.exists() and TokenFile.read(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)
    written = TokenFile.read(directory)
    assert written is not None, directory
    return written


@contextmanager
def cache_errors(directory: Path) -> Iterator[None]:
    """Raise DataError if `directory` of the data cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"The data cache {directory} cannot be written ({error}); set data.cache_dir.") from error


def _write(directory: Path, source: Source, encoder: Encoder, num_workers: int) -> list[Path]:
    """Write Arrow files of tokens into `directory`.

    The rows are read once, into a temporary file. `map` runs over a dataset of byte ranges of that file, one for each
    batch, so each process reads its own batches. The dataset itself stays small, as mapped files count as memory.
    """
    import datasets

    with TemporaryDirectory(dir=directory) as held, quiet_datasets(), _errors_of_map(num_workers):
        file = Path(held) / "rows"
        ends, num_rows = _store(source, encoder.kind, file)
        if not num_rows:
            raise source.empty(num_rows)
        encoder.kind.check_num_rows(num_rows, source.name)
        ranges = datasets.Dataset.from_dict({"start": [0, *ends[:-1]], "stop": ends})
        num_workers = min(num_workers, len(ranges))
        tokens = ranges.map(
            _EncodeBatch(file, encoder),
            batched=True,
            batch_size=1,
            remove_columns=ranges.column_names,
            features=datasets.Features.from_arrow_schema(encoder.schema),
            cache_file_name=str(directory / "tokens.arrow"),
            new_fingerprint="tokens",
            num_proc=num_workers if num_workers > 1 else None,
            desc=one_line(f"tokenizing {source.name}"),
        )
        return [Path(file["filename"]) for file in tokens.cache_files]


def _store(source: Source, kind: Kind, file: Path) -> tuple[list[int], int]:
    """Write rows as lines of JSON; return where each batch of them ends, and the number of rows.

    Raises:
        DataError: A row cannot be written, or has a value that `kind` rejects and that JSON would store as text.
    """
    from tqdm import tqdm

    ends, number, columns = list[int](), 0, kind.columns
    title, rows = one_line(f"reading {source.name}"), source.rows(columns)
    with file.open("wb") as out, tqdm(rows, title, unit=" rows", unit_scale=True, disable=None, leave=False) as bar:
        for number, row in enumerate(bar, 1):
            values = {name: row.values[name] for name in columns if name in row.values} or row.values
            if not all(isinstance(value, _OF_JSON) for value in values.values()):
                kind.read(row)  # raises the error of a wrong type
            try:
                text = json.dumps([row.where, values, row.is_text, row.header], ensure_ascii=False, default=str)
            except RecursionError as error:
                raise DataError(f"{row.where} has too many levels of lists; correct or remove it.") from error
            out.write(text.encode(errors="surrogatepass") + b"\n")  # as the name of a file may need it
            if out.tell() - (ends[-1] if ends else 0) >= _BATCH_BYTES or number % _BATCH_ROWS == 0:
                ends.append(out.tell())
        if out.tell() > (ends[-1] if ends else 0):
            ends.append(out.tell())
    return ends, number


@dataclass(frozen=True)
class _EncodeBatch:
    """Tokenizes a batch of rows, a byte range of a file; plain data, because it is sent to other processes."""

    file: Path
    encoder: Encoder

    def __call__(self, ranges: dict[str, list[int]]) -> pyarrow.Table:
        start, stop = ranges["start"][0], ranges["stop"][0]
        with self.file.open("rb") as stream:
            stream.seek(start)
            rows = [json.loads(line) for line in stream.read(stop - start).splitlines()]
        return self.encoder([Row(at, values, text, head and Header(*head)) for at, values, text, head in rows])


@contextmanager
def _errors_of_map(num_workers: int) -> Iterator[None]:
    """Raise our own errors unchanged, name the setting if a process died, and restore the environment after `map`."""
    environment = os.environ  # `map` with several processes replaces it
    with set_environment({"TOKENIZERS_PARALLELISM": "false"} if num_workers > 1 else {}):
        try:
            yield
        except Exception as error:
            if isinstance(error.__cause__, DataError):
                raise error.__cause__ from None
            if not isinstance(error, RuntimeError) or "died" not in str(error):
                raise
            raise DataError(
                f"One of the data.workers={num_workers} processes that tokenize was killed, possibly by the "
                f"out-of-memory killer; reduce it."
            ) from error
        finally:
            os.environ = environment  # noqa: B003  # the same object as before


def _remove_leftovers(cache: Path) -> None:
    """Delete old files that killed runs left behind; age decides, because machines with one cache share no lock."""
    for entry in cache.glob(".*.partial"):
        with suppress(OSError):  # it may be finished by now, or belong to another user
            changed = max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
            if time.time() - changed > _LEFTOVER_SECONDS and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
