"""Rows as examples in files, written once by one process and memory-mapped by all; `kinds` makes the examples.

An example file is a directory `<cache>/<fingerprint>/` of flat little-endian arrays and `meta.json`. Nothing is
truncated in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_shard.data.kinds.kind import Example, Kind, Tokenizer, ends_in_special
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.tokenized import cache_directory as cache
from fsdp_shard.data.tokenized.token_cache import tokenizer_state
from fsdp_shard.data.tokenized.worker_pool import ordered_map
from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_count

_FORMAT_VERSION = 1
_BATCH_ROWS = 256
_NONE = -1  # no predicted token, no class
_ARRAYS = ("tokens", "predicted", "ends", "first", "labels")


@dataclass(frozen=True)
class ExampleFile:
    """One tokenized source on disk. `digest` is of the examples alone: equal digests are equal examples.

    `num_rows` rows gave `num_examples`; `num_dropped` of them had nothing to predict. `classes` are the names of the
    classes by index. `keeps_last` tells that the last token ends a text, and stays when it is truncated.
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
        """Memory-map the arrays, read-only; raise DataError if this process cannot see them."""
        arrays = {name: cache.map_array(self.directory, name, *shape) for name, shape in self._shapes().items()}
        return Examples(**arrays, name=self.digest, keeps_last=self.keeps_last)

    def sizes(self) -> dict[str, int]:
        """Return the size of each array in bytes."""
        return {name: np.dtype(dtype).itemsize * size for name, (dtype, size) in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[str, int]]:
        per_example = dict.fromkeys(("ends", "first", "labels"), ("<i8", self.num_examples))
        return {"tokens": (self.dtype, self.num_tokens), "predicted": ("u1", self.num_tokens)} | per_example


@dataclass(frozen=True)
class Examples:
    """Examples as arrays.

    Attributes:
        tokens: Token ids [num_tokens].
        predicted: Whether each token is predicted, uint8 [num_tokens].
        ends: Where each example ends in these, int64 [num_examples].
        first: Position in each example of its first predicted token, -1 without one; int64 [num_examples].
        labels: The class of each example, -1 without one; int64 [num_examples].
        name: Identifies the examples.
        keeps_last: Whether the last token ends a text, and stays when it is truncated.
    """

    tokens: npt.NDArray[Any]
    predicted: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    first: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    name: str
    keeps_last: bool = False

    @classmethod
    def of(
        cls, examples: Sequence[Example], labels: Sequence[int], keeps_last: bool = False, dtype: str = "<i8"
    ) -> Examples:
        """Build the arrays of `examples`, whose classes have the indices `labels`; `dtype` is that of the tokens."""
        return cls(
            tokens=np.fromiter(chain.from_iterable(example.ids for example in examples), dtype),
            predicted=np.fromiter(chain.from_iterable(example.predicted for example in examples), "u1"),
            ends=np.cumsum([len(example.ids) for example in examples], dtype="<i8"),
            first=np.asarray([e.predicted.index(True) if True in e.predicted else _NONE for e in examples], "<i8"),
            labels=np.asarray(labels, "<i8"),
            name="",
            keeps_last=keeps_last,
        )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example [num_examples]."""
        return np.diff(self.ends, prepend=0)

    def tokens_of(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return token ids and whether each is predicted, both [length], of one example."""
        start, stop = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return self.tokens[start:stop], self.predicted[start:stop]


def encode_source(
    source: Source, kind: Kind, tokenizer: Tokenizer, cache_dir: Path, num_workers: int = 1
) -> ExampleFile:
    """Tokenize the rows of a source, unless that is in the cache.

    Args:
        source: The rows.
        kind: How rows become examples.
        tokenizer: The tokenizer.
        cache_dir: Directory of the cache.
        num_workers: Processes that tokenize.

    Raises:
        DataError: There is nothing to train on, the tokenizer is unusable, or the cache cannot be written.
    """
    kind.check_tokenizer(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    parts = [_FORMAT_VERSION, source.fingerprint(), tokenizer_state(tokenizer), template, kind.fingerprint()]
    return cache.cached(
        cache_dir / cache.cache_key(parts),
        lambda directory: cache.read_meta(directory, _FORMAT_VERSION, ExampleFile, ExampleFile.sizes),
        lambda temporary: _write(temporary, source, kind, tokenizer, num_workers),
    )


def encode_rows(rows: list[Row], kind: Kind, tokenizer: Tokenizer) -> list[list[Example]]:
    """Return the examples of each row; none for a row with nothing to predict."""
    are_usable = [kind.check_row(row) for row in rows]
    usable = list(compress(rows, are_usable))
    encoded = iter(kind.encode(usable, tokenizer) if usable else [])
    return [next(encoded) if is_usable else [] for is_usable in are_usable]


@dataclass
class _Writer:
    """Writes arrays, batch by batch, and collects the names of classes in the order of their appearance."""

    files: Mapping[str, BinaryIO]
    dtype: str
    digest: Any = field(default_factory=xxhash.xxh3_128)
    num_tokens: int = 0
    num_examples: int = 0
    num_rows: int = 0
    num_dropped: int = 0
    classes: dict[str | int, int] = field(default_factory=dict)

    def add(self, rows: list[list[Example]]) -> int:
        """Append the examples of `rows`; return their number of tokens."""
        examples = list(chain.from_iterable(rows))
        arrays = Examples.of(examples, [self._class(example.label) for example in examples], dtype=self.dtype)
        assert len(arrays.tokens) == len(arrays.predicted)
        arrays.ends[:] += self.num_tokens
        for name in _ARRAYS:
            array = getattr(arrays, name)
            self.files[name].write(array.data)
            if name != "first":
                self.digest.update(array.data)
        self.num_tokens += len(arrays.tokens)
        self.num_examples += len(examples)
        self.num_rows += len(rows)
        self.num_dropped += sum(not row for row in rows)
        return len(arrays.tokens)

    def _class(self, label: str | int | None) -> int:
        return _NONE if label is None else self.classes.setdefault(label, len(self.classes))


def _write(temporary: Path, source: Source, kind: Kind, tokenizer: Tokenizer, num_workers: int) -> None:
    """Write the arrays and meta.json into `temporary`, flushed to the disk."""
    from tqdm import tqdm

    encode = partial(encode_rows, kind=kind, tokenizer=tokenizer)
    with ExitStack() as stack:
        files = {name: stack.enter_context((temporary / f"{name}.bin").open("wb")) for name in _ARRAYS}
        bar = stack.enter_context(tqdm(desc=f"tokenizing {source.name}", unit=" tokens", unit_scale=True, disable=None))
        writer = _Writer(files, "<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        batches = cache.batched(source.rows(kind.columns), lambda row: 1, _BATCH_ROWS)
        for encoded in ordered_map(encode, batches, num_workers):
            bar.update(writer.add(encoded))
        for file in files.values():
            cache.flush(file)
    if not writer.num_examples:
        raise DataError(
            f"{source.name} has nothing to train on: no token to predict in {format_count(writer.num_rows, 'row')}."
        )
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
    cache.write_meta(temporary, _FORMAT_VERSION, asdict(meta))


def _sort_classes(file: Path, found: Mapping[str | int, int]) -> list[str | int]:
    """Number the classes in `file` by their sorted names instead of their first appearance."""
    ordered = sorted(found, key=lambda name: (isinstance(name, str), name))
    if found:
        numbers = np.empty(len(found), "<i8")
        numbers[[found[name] for name in ordered]] = np.arange(len(found))
        labels = np.fromfile(file, "<i8")
        with file.open("wb") as stream:
            stream.write(numbers[labels].data)
            cache.flush(stream)
    return ordered
