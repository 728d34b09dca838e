"""Rows to tables of tokens, the one form of tokenized rows: in files of the cache, and between the ranks of a stream.

A table has a row for each row of the data: the tokens of all of its examples, whether each is predicted, the length of
each example, the position in it of its first predicted token, and the class, as JSON. They are empty for a row with
nothing to learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fsdp_shard.data.kinds.kind import Kind, Tokenizer, beginning, letter_ids
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import DataError
from fsdp_shard.utils import LimitedProcess, set_environment

if TYPE_CHECKING:
    import pyarrow

NONE = -1  # no predicted token, no class
_BYTES_OF_A_ROW, _BYTES_FOR_THREADS = 1024, 1 << 18  # a short row, too, takes time to render


@dataclass(frozen=True)
class Encoder:
    """Makes tables of tokens; plain data, as it is sent to other processes."""

    kind: Kind
    tokenizer: Tokenizer

    @cached_property
    def schema(self) -> pyarrow.Schema:
        """The types of the columns: of tokens, the smallest that has all ids of the tokenizer."""
        import pyarrow

        largest = max(self.tokenizer.get_vocab().values(), default=0)
        tokens = pyarrow.uint16() if largest < 1 << 16 else pyarrow.uint32()
        lists = {"tokens": pyarrow.large_list(tokens), "predicted": pyarrow.large_list(pyarrow.uint8())}
        lists |= dict.fromkeys(("lengths", "first"), pyarrow.large_list(pyarrow.int64()))
        return pyarrow.schema(lists | {"label": pyarrow.string()})

    def __call__(self, rows: Sequence[Row]) -> pyarrow.Table:
        """Tokenize `rows`; raise DataError if one cannot be used."""
        import pyarrow

        examples = self.kind.encode(rows, self.tokenizer)
        columns = {
            "tokens": [np.fromiter(chain.from_iterable(one.ids for one in row), np.uint32) for row in examples],
            "predicted": [np.fromiter(chain.from_iterable(one.predicted for one in row), np.uint8) for row in examples],
            "lengths": [[len(one.ids) for one in row] for row in examples],
            "first": [[_first(one.predicted) for one in row] for row in examples],
            "label": [json.dumps(row[0].label) if row and row[0].label is not None else None for row in examples],
        }
        return pyarrow.table(columns, self.schema)

    def limited(self) -> LimitedEncoder:
        """The same in a process that can be ended."""
        return LimitedEncoder(self)

    def fingerprint(self) -> list[Any]:
        """Return, as JSON, everything that decides about the tokens except for the rows."""
        template = getattr(self.tokenizer, "chat_template", None)
        return [tokenizer_state(self.tokenizer), template, self.kind.fingerprint()]


class LimitedEncoder:
    """Calls an encoder in a process of its own, which is ended if tokenizer or template take too much for some rows.

    It begins with the first call, or `start`. In another process that this is sent to, it is another one.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._process: LimitedProcess[Sequence[Row], pyarrow.Table] | None = None
        self._owner = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitedEncoder, (self.encoder,)

    def start(self) -> None:
        """Fork the process, unless that was done."""
        if self._process is None or self._owner != os.getpid():
            what = f"tokenizing with {self.encoder.tokenizer.name_or_path}"
            self._process, self._owner = LimitedProcess(self._encode, what, error=DataError), os.getpid()

    def __call__(self, rows: Sequence[Row]) -> pyarrow.Table:
        """As `Encoder`; raises DataError, too, if it takes more time or memory than the limits for these rows."""
        self.start()
        assert self._process is not None
        return self._process(rows, _num_bytes(rows))

    def _encode(self, rows: Sequence[Row]) -> pyarrow.Table:
        # The threads take memory, each for itself.
        alone = {} if _num_bytes(rows) >= _BYTES_FOR_THREADS else {"TOKENIZERS_PARALLELISM": "false"}
        with set_environment(alone):
            return self.encoder(rows)


def _num_bytes(rows: Sequence[Row]) -> int:
    return sum(_BYTES_OF_A_ROW + sum(len(str(value)) for value in row.values.values()) for row in rows)


def _first(predicted: list[bool]) -> int:
    return predicted.index(True) if True in predicted else NONE


def tokenizer_state(tokenizer: Tokenizer) -> list[Any]:
    """Return, as JSON, everything about the tokenizer that decides about the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        backend.no_truncation()  # state of the last call, without effect on the next
        backend.no_padding()
        state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # chat templates name them
    around = letter_ids(tokenizer), letter_ids(tokenizer, is_target=True)  # languages, of targets too
    ends = [beginning(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return [state, *ends, special, getattr(tokenizer, "split_special_tokens", False), *around]
