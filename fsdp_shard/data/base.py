"""What to train on: the settings of `data.*`, and the check of them that the parent makes before any rank starts.

Imports neither torch, numpy nor `datasets`, so that composing a config stays quick. Knows nothing of tokens: that is
`tokens.py`, and how they are read back is `windows.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.errors import ConfigError
from fsdp_shard.settings import REQUIRED, setting


@dataclass
class DataConfig:
    """Settings of the text that is trained on and of the text that is held out."""

    path: str = setting(
        REQUIRED,
        "Text to train on: a .txt, .md, .jsonl, .parquet or .csv file, a directory of such files, or a hub data set.",
    )
    eval_path: str | None = setting(None, "Held-out text, given like data.path. Default: see data.eval_fraction.")
    eval_fraction: float = setting(
        0.0,
        "Part of data.path to hold out when data.eval_path is not given: its last windows, which are then not trained.",
        minimum=0.0,
        maximum=0.5,
    )
    kind: str = setting("text", "What a row is. text: running text, joined and cut into windows.", choices=("text",))
    sequence_length: int = setting(1024, "Tokens in each window.", minimum=1)
    text_column: str = setting("text", "The column that holds the text (.jsonl, .parquet, .csv, hub data sets).")
    sample_by: str = setting(
        "document",
        "What counts as one document in a plain text file: the whole file, a paragraph or a line. An end-of-text token "
        "is put between documents.",
        choices=("document", "paragraph", "line"),
    )
    subset: str | None = setting(None, "Named configuration of a hub data set, such as wikitext-2-raw-v1.")
    split: str = setting("train", "Split of the hub data set in data.path.")
    eval_split: str = setting("validation", "Split of the hub data set in data.eval_path.")
    cache_dir: str | None = setting(
        None, "Where tokenised text is kept; every rank must see it. Default: ~/.cache/fsdp-shard/tokens."
    )

    def check(self, prefix: str) -> None:
        """Refuse two ways of naming the held-out text at once."""
        if self.eval_path is not None and self.eval_fraction > 0:
            raise ConfigError(
                f"{prefix}eval_path={self.eval_path} and {prefix}eval_fraction={self.eval_fraction} both say what to "
                f"hold out; give one of them."
            )


def cache_directory(config: DataConfig) -> Path:
    """Directory of the token cache: `data.cache_dir`, else below XDG_CACHE_HOME, else below ~/.cache."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fsdp-shard" / "tokens"


def check_data(config: DataConfig) -> None:
    """Raise DataError or ConfigError when the text cannot be read: no such file, no rows, no such column.

    Reads up to the first document that is not empty, and no further. Nothing is written and no torch is imported; a
    hub data set is downloaded into the `datasets` cache, where the ranks will find it.
    """
    from fsdp_shard.data.sources import open_source

    sources = [open_source(config, held_out=False)]
    if config.eval_path is not None:
        sources.append(open_source(config, held_out=True))
    for source in sources:
        source.check()
