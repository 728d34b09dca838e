"""From the settings of `data.*` to the windows that are trained and those that are held out.

One process tokenises (`tokenise_all`), every process maps the result (`open_windows`); `prepare` does both in one
process, `prepare_on_ranks` over the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.data.base import DataConfig, cache_directory
from fsdp_shard.data.sources import open_source
from fsdp_shard.data.tokens import TokenFile, tokenise
from fsdp_shard.data.windows import WindowDataset
from fsdp_shard.errors import DataError, FsdpShardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.distributed import DistributedContext


@dataclass(frozen=True)
class Tokenised:
    """The token files of a config; `held_out` is None when nothing, or a part of `train`, is held out."""

    train: TokenFile
    held_out: TokenFile | None


@dataclass(frozen=True)
class Windows:
    """What is trained and what is held out (None: nothing), and what became of the text, for people to read."""

    train: WindowDataset
    held_out: WindowDataset | None
    notes: tuple[str, ...]


def tokenise_all(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Tokenised:
    """Tokenise what the cache does not have; for one process. Raises DataError."""
    cache = cache_dir or cache_directory(config)
    train = tokenise(open_source(config, held_out=False), tokenizer, cache, f"data.path={config.path}")
    if config.eval_path is None:
        return Tokenised(train, None)
    held_out = open_source(config, held_out=True)
    return Tokenised(train, tokenise(held_out, tokenizer, cache, f"data.eval_path={config.eval_path}"))


def open_windows(config: DataConfig, tokenised: Tokenised) -> Windows:
    """Map token files and cut them into windows; for every process. Raises DataError."""
    train, held_out = _windows(config, tokenised.train), None
    notes = [_note("train", tokenised.train, train)]
    if tokenised.held_out is not None:
        held_out = _windows(config, tokenised.held_out)
        notes.append(_note("held out", tokenised.held_out, held_out))
    elif config.eval_fraction > 0:
        num_train = _num_train(config, len(train))
        train, held_out = train.slice(0, num_train), train.slice(num_train, len(train))
        notes.append(f"held out: the last {len(held_out)} of these windows, so {len(train)} are trained")
    return Windows(train, held_out, tuple(notes))


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Windows:
    """Tokenise what the cache does not have and open it, in one process. Raises DataError."""
    return open_windows(config, tokenise_all(config, tokenizer, cache_dir))


def prepare_on_ranks(
    config: DataConfig,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context: DistributedContext,
    cache_dir: Path | None = None,
) -> Windows:
    """Tokenise on rank 0 and open on every rank; the others need no tokenizer. An error of rank 0 is raised by all."""
    outcome: Tokenised | FsdpShardError | None = None
    if context.is_main:
        try:
            outcome = tokenise_all(config, open_tokenizer(), cache_dir)
        except FsdpShardError as error:
            outcome = error
    outcome = context.broadcast_object(outcome)
    if isinstance(outcome, FsdpShardError):
        raise outcome
    assert outcome is not None
    return open_windows(config, outcome)


def _windows(config: DataConfig, file: TokenFile) -> WindowDataset:
    return WindowDataset(file.open(), config.sequence_length, file.digest)


def _num_train(config: DataConfig, num_windows: int) -> int:
    if num_windows < 2:
        raise DataError(
            f"data.eval_fraction={config.eval_fraction} cannot hold out a part of data.path={config.path}: the text is "
            f"a single window of data.sequence_length={config.sequence_length} tokens. Give more text, shorter "
            f"windows, or data.eval_path."
        )
    return num_windows - min(num_windows - 1, max(1, round(num_windows * config.eval_fraction)))


def _note(what: str, file: TokenFile, windows: WindowDataset) -> str:
    empty = f" ({file.num_empty_documents} empty ones left out)" if file.num_empty_documents else ""
    padded = f", the last padded by {windows.num_padded}" if windows.num_padded else ""
    return (
        f"{what}: {file.num_documents} documents{empty}, {file.num_tokens} tokens, {len(windows)} windows of "
        f"{windows.sequence_length}{padded}"
    )
