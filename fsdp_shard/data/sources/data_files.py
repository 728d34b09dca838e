"""Data files, at a local path or at any address that fsspec opens (s3://, https://, hf://, ...)."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import xxhash

from fsdp_shard.errors import DataError
from fsdp_shard.utils import redact

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LINES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")  # of files read as lines
KNOWN = f"{', '.join((*LINES, *TABLES))} (those of text also with {' or '.join(COMPRESSIONS)})"

_AT_ONCE = 1 << 20
SAVED_SPLITS = "dataset_dict.json"
_PATTERN, _HIDDEN = re.compile(r"[*?\[]"), re.compile(r"(^|/)\.")


@dataclass(frozen=True)
class DataFile:
    """One file.

    Attributes:
        address: A local path, or a URL.
        name: Its path relative to the given directory, or the name of a given file.
    """

    address: str
    name: str

    def __str__(self) -> str:
        """The path or URL for messages; a path in the current directory is relative to it."""
        return without_credentials(self.address).removeprefix(f"{os.getcwd()}/")

    @property
    def format(self) -> tuple[str, str]:
        """Lower-case extension and compression, such as (".jsonl", ".gz"); the latter may be empty."""
        return _format(self.address)

    def info(self) -> dict[str, Any]:
        """Return the store's metadata of the file, such as its `size` in bytes, which some web servers omit."""
        if not is_url(self.address):
            return {"size": os.stat(self.address).st_size}
        store, path = _store(self.address)
        return {key: str(value) if key != "size" else value for key, value in store.info(path).items() if key != "url"}

    def digest(self, first: int | None = None) -> str:
        """Return the digest of the stored bytes, or of only the `first` ones."""
        with self.open(is_stored=True) as stream:
            if first is not None:
                return xxhash.xxh3_128_hexdigest(stream.read(first))
            return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]  # of the same form

    @contextmanager
    def open(self, offset: int = 0, *, is_stored: bool = False) -> Iterator[BinaryIO]:
        """Open the content at an offset, decompressed unless `is_stored`."""
        with ExitStack() as stack:
            if is_url(self.address):
                import fsspec

                options = {"block_size": 0} if _is_web(self.address) else {}  # many servers do not support byte ranges
                stream = stack.enter_context(fsspec.open(self.address, "rb", **options))
            else:
                stream = stack.enter_context(Path(self.address).open("rb"))
            compression = "" if is_stored else self.format[1]
            if compression == ".gz":
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            elif compression == ".zst":
                import pyarrow  # fsspec needs another package for it

                stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"))
            if compression == ".gz" or not (compression or _is_web(self.address)):
                stream.seek(offset)
            else:
                while offset > 0 and (skipped := len(stream.read(min(offset, _AT_ONCE)))):
                    offset -= skipped
            yield cast("BinaryIO", stream)


def find_files(given: str, setting: str) -> tuple[list[DataFile], list[str]]:
    """Find the files at a path or URL, or those that match a pattern such as data/*.jsonl.

    Args:
        given: The path, URL or pattern.
        setting: The setting with that value, for messages.

    Returns:
        The files sorted by name, and the names of those that are not read; both empty if nothing is there.

    Raises:
        DataError: The files cannot be read.
    """
    store, root = _store(given)
    address = store.unstrip_protocol if is_url(given) else str
    if has_known_extension(given) and store.isfile(root):
        return [DataFile(given if is_url(given) else root, root.rpartition("/")[2])], []
    directory, paths = root, []
    # Listing a URL on a web server downloads its content, so only a URL that ends in / is a directory.
    if (given.endswith("/") or not _is_web(given)) and store.isdir(root):
        paths = store.find(root)
    elif store.exists(root):
        problem = "has an unknown extension" if store.isfile(root) else "is not a regular file"
        raise DataError(f"{setting}={without_credentials(given)} {problem}; expected {KNOWN}.")
    elif _PATTERN.search(root) and (paths := store.glob(root)):
        directory = _PATTERN.split(root)[0].rpartition("/")[0]
    else:
        return [], []
    of_names = {
        path.removeprefix(directory).strip("/"): path for path in paths if is_url(given) or os.path.isfile(path)
    }
    names = sorted((name for name in of_names if not _HIDDEN.search(name)), key=lambda name: name.split("/"))
    files = [DataFile(address(of_names[name]), name) for name in names if has_known_extension(name)]
    if not files:
        raise DataError(
            f"{setting}={without_credentials(given)} is a directory without text: no file in it has the extension "
            f"{KNOWN}."
        )
    return files, [name for name in names if not has_known_extension(name)]


def saved_dataset(given: str) -> str | None:
    """Return the file that identifies a directory written by `save_to_disk` of `datasets`; None for others."""
    store, root = _store(given)
    marks = () if has_known_extension(given) else (SAVED_SPLITS, "state.json")
    return next((name for name in marks if store.isfile(f"{root}/{name}")), None)


def is_url(address: str) -> bool:
    """Return whether `address` is a URL rather than a local path."""
    return "://" in address


def without_credentials(address: str) -> str:
    """Return `address` without credentials and without the query, which may hold a signature."""
    return redact(address.partition("?")[0] if _is_web(address) else address)


def has_known_extension(name: str) -> bool:
    """Return whether a file with this name can be read."""
    extension, compression = _format(name)
    return extension in LINES or (extension in TABLES and not compression)


def _is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _format(name: str) -> tuple[str, str]:
    rest, last = os.path.splitext(without_credentials(name).lower())
    return (os.path.splitext(rest)[1], last) if last in COMPRESSIONS else (last, "")


def _store(address: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address, and the path within it."""
    import fsspec

    if not is_url(address):
        return fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(address))
    store, path = fsspec.url_to_fs(address)
    return store, str(path)
