"""Tokenized data on disk: Arrow files of a directory of the cache, which every process maps into its memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.kinds.kind import Example
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_FORMAT_VERSION = 2
_NONE = -1  # no predicted token, no class


# An array, or a column of Arrow files that are mapped: `np.asarray` of a slice reads that slice.
Array: TypeAlias = "npt.NDArray[Any] | pyarrow.ChunkedArray"


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

    tokens: Array
    predicted: Array
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
        return np.asarray(self.tokens[start:stop]), np.asarray(self.predicted[start:stop])


@dataclass(frozen=True)
class TokenFile:
    """One tokenized source: a stream of tokens, or examples.

    Attributes:
        directory: Where its files are.
        sizes: Bytes of each file by name, in order.
        num_rows: Rows of the source.
        num_dropped: Those that had nothing to train on.
        num_tokens: Tokens of all of them.
        digest: Of the tokens and what comes with them alone: equal digests are equal samples.
        num_examples: Number of examples, or of documents.
        classes: The names of the classes by index.
        keeps_last: Whether the last token ends a text, and stays when it is truncated.
    """

    directory: str
    sizes: dict[str, int]
    num_rows: int
    num_dropped: int
    num_tokens: int
    digest: str
    num_examples: int
    classes: list[str | int] = field(default_factory=list)
    keeps_last: bool = False

    @classmethod
    def read(cls, directory: Path) -> TokenFile | None:
        """Read meta.json; return None if the directory is absent, of another version, or incomplete."""
        try:
            meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
            if meta.pop("format_version") != _FORMAT_VERSION:
                return None
            found = cls(**{**meta, "directory": str(directory)})
            is_complete = all((directory / name).stat().st_size == size for name, size in found.sizes.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return found if is_complete else None

    def write_meta(self) -> None:
        """Write meta.json."""
        values = {"format_version": _FORMAT_VERSION, **asdict(self)}
        (Path(self.directory) / "meta.json").write_text(json.dumps(values, indent=1), encoding="utf-8")

    def tokens(self) -> Array:
        """Map the tokens of a stream, without the separator before the first document."""
        from pyarrow import compute

        tokens = compute.list_flatten(self._table()["tokens"])
        return tokens[len(tokens) - self.num_tokens :]

    def examples(self) -> Examples:
        """Map the examples."""
        import pyarrow
        from pyarrow import compute

        table = self._table()
        names = pyarrow.array([json.dumps(name) for name in self.classes], pyarrow.string())
        return Examples(
            tokens=compute.list_flatten(table["tokens"]),
            predicted=compute.list_flatten(table["predicted"]),
            ends=np.cumsum(compute.list_value_length(table["tokens"]).to_numpy(), dtype=np.int64),
            first=table["first"].to_numpy(),
            labels=compute.index_in(table["label"], names).fill_null(_NONE).to_numpy().astype(np.int64),
            name=self.digest,
            keeps_last=self.keeps_last,
        )

    def _table(self) -> pyarrow.Table:
        import pyarrow

        try:
            files = [pyarrow.memory_map(str(Path(self.directory) / name)) for name in self.sizes]
            return pyarrow.concat_tables([pyarrow.ipc.open_stream(file).read_all() for file in files])
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{self.directory} cannot be mapped ({error}); every rank must see the token cache. Set "
                f"data.cache_dir to a directory that all machines share."
            ) from error
