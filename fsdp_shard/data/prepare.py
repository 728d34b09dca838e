"""From the settings of `data.*` to the samples that are trained and those that are held out.

One process tokenises (`tokenise_all`), every process maps the result (`open_samples`); `prepare` does both in one
process, `prepare_on_ranks` over the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.data.base import DataConfig, cache_directory
from fsdp_shard.data.dataset import HeldOut
from fsdp_shard.data.examples import ExampleFile, encode_source
from fsdp_shard.data.kinds.registry import kind_of
from fsdp_shard.data.packing import PackedDataset
from fsdp_shard.data.rows import CausalRows, Cut, cut_causal
from fsdp_shard.data.sources import open_source
from fsdp_shard.data.tokens import TokenFile, tokenise
from fsdp_shard.data.windows import WindowDataset
from fsdp_shard.errors import DataError, FsdpShardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.distributed import DistributedContext


@dataclass(frozen=True)
class Tokenised:
    """The files of a config; `held_out` is None when nothing, or a part of `train`, is held out."""

    train: TokenFile | ExampleFile
    held_out: TokenFile | ExampleFile | None


@dataclass(frozen=True)
class Samples:
    """What is trained and what is held out (None: nothing), and what became of the rows, for people to read."""

    train: HeldOut
    held_out: HeldOut | None
    notes: tuple[str, ...]


def tokenise_all(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Tokenised:
    """Tokenise what the cache does not have; for one process. Raises DataError."""
    train = _tokenise(config, False, tokenizer, cache_dir)
    return Tokenised(train, _tokenise(config, True, tokenizer, cache_dir) if config.eval_path is not None else None)


def open_samples(config: DataConfig, tokenised: Tokenised) -> Samples:
    """Map the files and cut them into samples; for every process. Raises DataError."""
    train, note = _open(config, tokenised.train)
    held_out, notes = None, [f"train: {note}"]
    if tokenised.held_out is not None:
        held_out, note = _open(config, tokenised.held_out)
        notes.append(f"held out: {note}")
    elif config.eval_fraction > 0:
        num_train = _num_train(config, len(train))
        train, held_out = train.slice(0, num_train), train.slice(num_train, len(train))
        notes.append(f"held out: the last {len(held_out)} of these windows, so {len(train)} are trained")
    return Samples(train, held_out, tuple(notes))


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Samples:
    """Tokenise what the cache does not have and open it, in one process. Raises DataError."""
    return open_samples(config, tokenise_all(config, tokenizer, cache_dir))


def prepare_held_out(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> HeldOut:
    """What training would hold out, in one process; all of data.path when it would hold out nothing."""
    if config.eval_path is not None:  # without looking at data.path
        return _open(config, _tokenise(config, True, tokenizer, cache_dir))[0]
    samples = prepare(config, tokenizer, cache_dir)
    return samples.held_out or samples.train


def prepare_on_ranks(
    config: DataConfig,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context: DistributedContext,
    cache_dir: Path | None = None,
) -> Samples:
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
    return open_samples(config, outcome)


def _tokenise(
    config: DataConfig, held_out: bool, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None
) -> TokenFile | ExampleFile:
    """Running text is one stream of tokens; all else is examples."""
    source, cache = open_source(config, held_out), cache_dir or cache_directory(config)
    if config.kind == "text" and not config.packing:
        return tokenise(source, tokenizer, cache, source.name, config.workers)
    return encode_source(source, kind_of(config), tokenizer, cache, source.name, config.workers)


def _open(config: DataConfig, file: TokenFile | ExampleFile) -> tuple[HeldOut, str]:
    """The samples of one file, and what became of its rows."""
    length = config.sequence_length
    if isinstance(file, TokenFile):
        windows = WindowDataset(file.open(), length, file.digest)
        empty = f" ({file.num_empty_documents} empty ones left out)" if file.num_empty_documents else ""
        padded = f", the last padded by {windows.num_padded}" if windows.num_padded else ""
        counts = f"{file.num_documents} documents{empty}, {file.num_tokens} tokens"
        return windows, f"{counts}, {len(windows)} windows of {length}{padded}"
    examples = file.open()
    cut = cut_causal(examples, length)
    note = _row_note(config, file, cut)
    if not len(cut.kept):
        raise DataError(f"Of {note}: nothing is left to train on. Give a larger data.sequence_length.")
    rows = CausalRows(examples, cut.kept, length)
    if not config.packing:
        return rows, f"{note}, each in a window of up to {length}"
    packed = PackedDataset.pack(rows)
    full = 1 - packed.num_padded / (len(packed) * length)
    return packed, f"{note}, packed into {len(packed)} windows of {length} ({full:.1%} full)"


def _row_note(config: DataConfig, file: ExampleFile, cut: Cut) -> str:
    what = "documents" if config.kind == "text" else "rows"
    note = f"{file.num_rows} {what}, {file.num_tokens} tokens"
    if file.num_dropped:
        note += f", {file.num_dropped} {what} dropped that have nothing to learn"
    if cut.num_dropped:
        note += f", {cut.num_dropped} dropped as nothing to learn lies in their first {config.sequence_length} tokens"
    return note + (f", {cut.num_truncated} cut to {config.sequence_length} tokens" if cut.num_truncated else "")


def _num_train(config: DataConfig, num_windows: int) -> int:
    if num_windows < 2:
        raise DataError(
            f"data.eval_fraction={config.eval_fraction} cannot hold out a part of data.path={config.path}: the text is "
            f"a single window of data.sequence_length={config.sequence_length} tokens. Give more text, shorter "
            f"windows, or data.eval_path."
        )
    return num_windows - min(num_windows - 1, max(1, round(num_windows * config.eval_fraction)))
