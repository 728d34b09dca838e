"""Converts rows to tables of tokens, the form of tokenized rows in cache files and between the ranks of a stream.

A table has a row for each row of the data: the tokens of all of its examples, whether each is predicted, and for each
example its length, the position of its first predicted token, its class as JSON and, if the data has them, its margin.
All are empty for a row with nothing to learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fsdp_shard.data.kinds.kind import Kind, Tokenizer, beginning_tokens, letter_ids
from fsdp_shard.data.sources.row import Row

if TYPE_CHECKING:
    import pyarrow

NONE = -1  # no predicted token, no class


@dataclass(frozen=True)
class Encoder:
    """Creates tables of tokens; plain data, as it is sent to other processes."""

    kind: Kind
    tokenizer: Tokenizer

    @cached_property
    def schema(self) -> pyarrow.Schema:
        """The column types; for tokens, the smallest type that fits all ids of the tokenizer."""
        import pyarrow

        largest = max(self.tokenizer.get_vocab().values(), default=0)
        tokens = pyarrow.uint16() if largest < 1 << 16 else pyarrow.uint32()
        lists = {"tokens": pyarrow.large_list(tokens), "predicted": pyarrow.large_list(pyarrow.uint8())}
        lists |= dict.fromkeys(("lengths", "first"), pyarrow.large_list(pyarrow.int64()))
        lists |= {"label": pyarrow.large_list(pyarrow.string()), "margin": pyarrow.large_list(pyarrow.float64())}
        return pyarrow.schema(lists)

    def __call__(self, rows: Sequence[Row]) -> pyarrow.Table:
        """Tokenize `rows`; raise DataError if one cannot be used."""
        import pyarrow

        examples = self.kind.encode(rows, self.tokenizer)
        columns = {
            "tokens": [np.fromiter(chain.from_iterable(one.ids for one in row), np.uint32) for row in examples],
            "predicted": [np.fromiter(chain.from_iterable(one.predicted for one in row), np.uint8) for row in examples],
            "lengths": [[len(one.ids) for one in row] for row in examples],
            "first": [[_first(one.predicted) for one in row] for row in examples],
            "label": [[None if one.label is None else json.dumps(one.label) for one in row] for row in examples],
            "margin": [[one.margin for one in row if one.margin is not None] for row in examples],
        }
        return pyarrow.table(columns, self.schema)

    def fingerprint(self) -> list[Any]:
        """Return, as JSON, everything that determines the tokens except the rows."""
        template = getattr(self.tokenizer, "chat_template", None)
        return [tokenizer_state(self.tokenizer), template, self.kind.fingerprint()]


def _first(predicted: list[bool]) -> int:
    return predicted.index(True) if True in predicted else NONE


def tokenizer_state(tokenizer: Tokenizer) -> list[Any]:
    """Return, as JSON, everything about the tokenizer that determines the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), *_made_with(tokenizer)]
    else:
        backend.no_truncation()  # left from the last call, without effect on the next
        backend.no_padding()
        state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # chat templates use them
    around = letter_ids(tokenizer), letter_ids(tokenizer, is_target=True)  # language tokens, also for targets
    ends = [beginning_tokens(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return [state, *ends, special, getattr(tokenizer, "split_special_tokens", False), *around]


def _made_with(tokenizer: Tokenizer) -> list[Any]:
    """Return the arguments of a slow tokenizer: its settings, such as lower case, and its vocabulary files.

    The directory of these files is not included.
    """
    names = getattr(tokenizer, "vocab_files_names", {})
    places = {"name_or_path", "is_local", "local_files_only", *names}
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name not in places and not name.endswith("_file")
    }
    digests = []
    for setting, name in sorted(names.items()):
        given = getattr(tokenizer, setting, None), Path(tokenizer.name_or_path, name)
        paths = [Path(path) for path in given if isinstance(path, (str, Path)) and os.path.isfile(path)]
        digests += [[setting, xxhash.xxh3_128_hexdigest(path.read_bytes())] for path in paths[:1]]
    return [json.dumps(settings, sort_keys=True, default=repr), digests]
