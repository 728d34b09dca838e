"""Checks of data settings against the files and the tokenizer, before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.data.config import DataConfig, all_sources, is_stream, sources_of
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.data.kinds.kind import Kind
    from fsdp_shard.data.sources.source import Source


def check_data(config: DataConfig, task: str = "causal_lm") -> None:
    """Raise DataError or ConfigError when the rows cannot be read: no such file, no rows, no such column.

    Reads up to the first row that has something to learn in it, and no further. Nothing is written and no torch is
    imported; a hub data set is downloaded into the `datasets` cache, where the ranks will find it.
    """
    for source in sources_of(config).values():
        check_source(source, held_out=False, task=task)
    if config.eval_path is not None:
        check_source(config, held_out=True, task=task)


def check_source(config: DataConfig, held_out: bool, task: str = "causal_lm") -> None:
    """`check_data` for one of the two sources."""
    from fsdp_shard.data.kinds.registry import kind_of
    from fsdp_shard.data.sources.readers import check_documents
    from fsdp_shard.data.sources.source import FileSource, open_source

    source = open_source(config, held_out)
    if config.streaming and not held_out and isinstance(source, FileSource):
        check_documents(source.files, config.sample_by)
    if is_stream(config, task):
        source.check()
    else:
        _require_rows(source, kind_of(config, task))


def check_tokenizer(config: DataConfig, tokenizer: PreTrainedTokenizerBase, task: str = "causal_lm") -> None:
    """Raise DataError when the tokenizer lacks what rows of this kind need, such as a chat template."""
    from fsdp_shard.data.kinds.registry import kind_of

    for source in all_sources(config):
        if not is_stream(source, task):
            kind_of(source, task).check_tokenizer(tokenizer)


def _require_rows(source: Source, kind: Kind) -> None:
    """Raise DataError when no row of `source` has anything to learn."""
    number = 0
    for row in source.rows(kind.columns):
        if kind.check_row(row):
            return
        number += 1
    raise DataError(
        f"{source.name} is empty: it has {number} rows, and none with anything to learn. Give a file with rows."
    )
