"""Rows to examples in files, made once by one process and memory-mapped by all; see `kinds/` for what an example is.

An example file is a directory `<cache>/<fingerprint>/` of flat little-endian arrays and `meta.json`. Nothing is cut to
a length here: windows are views. Knows no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.kinds.kind import Example, Kind, ends_in_special
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized.cache_directory import cached, write_json
from fsdp_shard.data.tokenized.token_cache import tokenizer_state
from fsdp_shard.data.tokenized.worker_pool import ordered_map
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 1
_BATCH_ROWS = 256
_NONE = -1  # no predicted token, no class


@dataclass(frozen=True)
class ExampleFile:
    """One tokenized source on disk. `digest` is of the examples alone: equal digests are equal examples.

    `num_rows` rows gave `num_examples`; those of `num_dropped` had nothing to predict. `classes` are the class names,
    in the order of their numbers. `keeps_last` says that the last token of a text ends it, and outlives its being cut.
    """

    directory: str
    dtype: str
    num_tokens: int
    num_examples: int
    num_rows: int
    num_dropped: int
    classes: list[str | int]
    keeps_last: bool
    digest: str

    def open(self) -> Examples:
        """The arrays, memory-mapped and read-only; raises DataError where this process cannot see them."""
        shapes = {"tokens": (self.dtype, self.num_tokens), "predicted": ("u1", self.num_tokens)}
        shapes |= dict.fromkeys(("ends", "first", "labels"), ("<i8", self.num_examples))
        arrays = {name: self._map(name, dtype, size) for name, (dtype, size) in shapes.items()}
        return Examples(**arrays, name=self.digest, keeps_last=self.keeps_last)

    def _map(self, name: str, dtype: str, size: int) -> npt.NDArray[Any]:
        file = Path(self.directory) / f"{name}.bin"
        try:
            return np.memmap(file, dtype=dtype, mode="r", shape=(size,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file} cannot be mapped here ({error}); every rank must see the token cache. Set data.cache_dir to a "
                f"directory that all machines share."
            ) from error


@dataclass(frozen=True)
class Examples:
    """Arrays over tokens (`tokens`, `predicted`) and over examples: where each ends in them, which of its tokens is the
    first to be predicted (-1: none), and its class.
    """

    tokens: npt.NDArray[Any]
    predicted: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    first: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    name: str
    keeps_last: bool = False

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def tokens_of(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(token ids, whether each is predicted) of one example."""
        start, stop = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return self.tokens[start:stop], self.predicted[start:stop]


def encode_source(
    source: Source, kind: Kind, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, what: str, num_workers: int = 1
) -> ExampleFile:
    """The example file of `source` below `cache_dir`: the one that is there, or a new one; errors name `what`."""
    kind.check_tokenizer(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    parts = [_FORMAT_VERSION, source.fingerprint(), tokenizer_state(tokenizer), template, kind.fingerprint()]
    directory = cache_dir / xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())
    encode = partial(encode_rows, kind=kind, tokenizer=tokenizer)
    return cached(
        directory,
        _read_meta,
        lambda temporary: _write(temporary, source.rows(kind.columns), encode, tokenizer, what, num_workers),
    )


def encode_rows(rows: list[Row], kind: Kind, tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
    """The examples of each of `rows`; none of a row in which nothing is to be predicted."""
    are_usable = [kind.check_row(row) for row in rows]
    usable = list(compress(rows, are_usable))
    encoded = iter(kind.encode(usable, tokenizer) if usable else [])
    return [next(encoded) if is_usable else [] for is_usable in are_usable]


@dataclass
class _Writer:
    """Arrays under way, and the class names in the order in which they were met."""

    files: Mapping[str, BinaryIO]
    dtype: str
    digest: Any = field(default_factory=xxhash.xxh3_128)
    num_tokens: int = 0
    num_examples: int = 0
    num_rows: int = 0
    num_dropped: int = 0
    classes: dict[str | int, int] = field(default_factory=dict)

    def add(self, rows: list[list[Example]]) -> int:
        """Append the examples of `rows`; their number of tokens."""
        examples = list(chain.from_iterable(rows))
        ids = np.fromiter(chain.from_iterable(e.ids for e in examples), dtype=self.dtype)
        predicted = np.fromiter(chain.from_iterable(e.predicted for e in examples), dtype="u1")
        assert len(ids) == len(predicted)
        ends = np.cumsum([len(e.ids) for e in examples], dtype="<i8") + self.num_tokens
        first = np.asarray([e.predicted.index(True) if True in e.predicted else _NONE for e in examples], "<i8")
        labels = np.asarray([self._number(e.label) for e in examples], "<i8")
        arrays = {"tokens": ids, "predicted": predicted, "ends": ends, "first": first, "labels": labels}
        for name, array in arrays.items():
            self.files[name].write(array.data)
        for array in (ids, predicted, ends, labels):
            self.digest.update(array.data)
        self.num_tokens += len(ids)
        self.num_examples += len(examples)
        self.num_rows += len(rows)
        self.num_dropped += sum(not row for row in rows)
        return len(ids)

    def _number(self, label: str | int | None) -> int:
        return _NONE if label is None else self.classes.setdefault(label, len(self.classes))


def _write(
    temporary: Path, rows: Iterable[Row], encode: Any, tokenizer: PreTrainedTokenizerBase, what: str, num_workers: int
) -> None:
    """Write the arrays and meta.json into `temporary`, flushed to the disk."""
    from contextlib import ExitStack

    from tqdm import tqdm

    names = ("tokens", "predicted", "ends", "first", "labels")
    with ExitStack() as stack:
        files = {name: stack.enter_context((temporary / f"{name}.bin").open("wb")) for name in names}
        bar = stack.enter_context(tqdm(desc=f"tokenizing {what}", unit=" tokens", unit_scale=True, disable=None))
        writer = _Writer(files, "<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        for encoded in ordered_map(encode, _batches(rows), num_workers):
            bar.update(writer.add(encoded))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not writer.num_examples:
        raise DataError(f"{what} has nothing to train on: none of its {writer.num_rows} rows has a word to predict.")
    classes = _sort_classes(temporary / "labels.bin", writer.classes)
    writer.digest.update(json.dumps([writer.dtype, list(writer.classes)]).encode())
    meta = ExampleFile(
        directory=str(temporary),
        dtype=writer.dtype,
        num_tokens=writer.num_tokens,
        num_examples=writer.num_examples,
        num_rows=writer.num_rows,
        num_dropped=writer.num_dropped,
        classes=classes,
        keeps_last=ends_in_special(tokenizer),
        digest=writer.digest.hexdigest(),
    )
    write_json(temporary / "meta.json", {"format_version": _FORMAT_VERSION, **asdict(meta)})


def _sort_classes(file: Path, met: Mapping[str | int, int]) -> list[str | int]:
    """Number the classes in `file` in the order of their names instead of that in which they were met."""
    ordered = sorted(met, key=lambda name: (isinstance(name, str), name))
    if met:
        numbers = np.empty(len(met), "<i8")
        numbers[[met[name] for name in ordered]] = np.arange(len(met))
        labels = np.fromfile(file, "<i8")
        with file.open("wb") as stream:
            stream.write(numbers[labels].data)
            stream.flush()
            os.fsync(stream.fileno())
    return ordered


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _read_meta(directory: Path) -> ExampleFile | None:
    """What `directory` holds, or None when it is absent, of another format version, or not whole."""
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if meta.pop("format_version") != _FORMAT_VERSION:
            return None
        file = ExampleFile(**{**meta, "directory": str(directory)})
        sizes = {"tokens": np.dtype(file.dtype).itemsize * file.num_tokens, "predicted": file.num_tokens}
        sizes |= dict.fromkeys(("ends", "first", "labels"), 8 * file.num_examples)
        whole = all((directory / f"{name}.bin").stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return file if whole else None
