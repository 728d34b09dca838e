"""From the settings of `data.*` to the samples that are trained and those that are held out.

One process tokenizes (`tokenize_all`), every process maps the result (`open_samples`); `prepare` does both in one
process, `prepare_on_ranks` over the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fsdp_shard.data.config import DataConfig, cache_directory, is_stream, mixture_of, sources_of
from fsdp_shard.data.kinds.registry import kind_of
from fsdp_shard.data.samples.factory import Shape
from fsdp_shard.data.samples.mixture import Mixture
from fsdp_shard.data.samples.mixture_schedule import whole_shares
from fsdp_shard.data.samples.protocol import Dataset, HeldOut
from fsdp_shard.data.sources.source import open_source, passed_over
from fsdp_shard.data.streaming.open_stream import open_streams
from fsdp_shard.data.task import CAUSAL, MASKED_LM, SpecialTokens, Task
from fsdp_shard.data.tokenized.example_cache import ExampleFile, encode_source
from fsdp_shard.data.tokenized.token_cache import TokenFile, tokenize
from fsdp_shard.errors import DataError, FsdpShardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.distributed import DistributedContext


File = TokenFile | ExampleFile

_PATIENCE_SECONDS = 30 * 24 * 3600.0  # a rank that dies is noticed at once, and one that hangs by its launcher


@dataclass(frozen=True)
class Tokenized:
    """The files of a config: one of each source by its name; `held_out` is None when nothing, or a part of `train`, is
    held out. `notes` is what people should know of what was given.
    """

    train: Mapping[str, File]
    held_out: File | None
    special: SpecialTokens | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Samples:
    """What is trained and what is held out (None: nothing), and what became of the rows, for people to read."""

    train: Dataset
    held_out: HeldOut | None
    notes: tuple[str, ...]


def tokenize_all(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None, task: str = CAUSAL
) -> Tokenized:
    """Tokenize what the cache does not have; for one process. Raises DataError."""
    special = SpecialTokens.of(tokenizer) if task == MASKED_LM else None
    sources = {} if config.streaming else sources_of(config)
    train = {name: _tokenize(source, False, tokenizer, cache_dir, task) for name, source in sources.items()}
    held_out = _tokenize(config, True, tokenizer, cache_dir, task) if config.eval_path is not None else None
    given = [*(source.path for source in sources.values()), *([config.eval_path] if config.eval_path else [])]
    return Tokenized(train, held_out, special, tuple(filter(None, map(passed_over, given))))


def open_samples(
    config: DataConfig,
    tokenized: Tokenized,
    task: Task | None = None,
    seed: int = 0,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
) -> Samples:
    """Map the files and cut them into samples; for every process. `seed` hides tokens. Raises DataError.

    Only a stream needs the tokenizer.
    """
    if config.streaming:
        assert open_tokenizer is not None
        stream, notes = open_streams(config, open_tokenizer(), task, seed)
        if tokenized.held_out is None:
            return Samples(stream, None, tuple(notes))
        kept_out, note = Shape(config, task or Task(), tokenized.special, seed).open(tokenized.held_out)
        return Samples(stream, kept_out, (*tokenized.notes, *notes, f"held out: {note}"))
    sources = sources_of(config)
    shares = whole_shares({name: source.weight for name, source in mixture_of(config).items()})
    train: dict[str, HeldOut] = {}
    held_out: dict[str, HeldOut] = {}
    notes = [*tokenized.notes]
    for name, source in sources.items():
        train[name], note = Shape(source, task or Task(), tokenized.special, seed).open(tokenized.train[name])
        notes.append(f"{_title(name, shares)}: {note}")
        if config.eval_fraction > 0:
            train[name], held_out[name] = _divide(source, train[name])
            kept, out = len(train[name]), len(held_out[name])
            notes.append(f"held out: the last {out} of these windows, so {kept} are trained")
    if tokenized.held_out is not None:
        held_out[""], note = Shape(config, task or Task(), tokenized.special, seed).open(tokenized.held_out)
        notes.append(f"held out: {note}")
    mixed = _mix(train, shares)
    if isinstance(mixed, Mixture):
        again = ", ".join(f"{name} {num:,}" for name, num in mixed.samples_for_one_epoch().items())
        notes.append(f"a source begins anew when so many samples of the mixture were trained: {again}")
    return Samples(mixed, _mix(held_out, shares) if held_out else None, tuple(notes))


def _title(name: str, shares: Mapping[str, int]) -> str:
    return f"train, {name} ({shares[name]} of {sum(shares.values())} samples)" if shares else "train"


def _divide(config: DataConfig, windows: HeldOut) -> tuple[HeldOut, HeldOut]:
    """What is trained and what is held out."""
    num_train = _num_train(config, len(windows))
    return windows.slice(0, num_train), windows.slice(num_train, len(windows))


def _mix(parts: Mapping[str, HeldOut], shares: Mapping[str, int]) -> HeldOut:
    return Mixture.of(parts, shares) if parts.keys() == shares.keys() else next(iter(parts.values()))


def prepare_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Samples:
    """Tokenize what the cache does not have and open it, in one process. Raises DataError."""
    return open_samples(config, tokenize_all(config, tokenizer, cache_dir), open_tokenizer=lambda: tokenizer)


def prepare_held_out(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> HeldOut:
    """What training would hold out, in one process; all of data.path when it would hold out nothing."""
    if config.eval_path is not None:  # without looking at data.path
        return Shape(config, Task(), None, 0).open(_tokenize(config, True, tokenizer, cache_dir, CAUSAL))[0]
    samples = prepare_data(config, tokenizer, cache_dir)
    return samples.held_out or cast("HeldOut", samples.train)  # no stream: those are for training alone


def prepare_on_ranks(
    config: DataConfig,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context: DistributedContext,
    cache_dir: Path | None = None,
    task: Task | None = None,
    seed: int = 0,
) -> Samples:
    """Tokenize on rank 0 and open on every rank; the others need a tokenizer for a stream only.

    An error of rank 0 is raised by all. They wait as long as it takes, by a group of their own: large texts take hours.
    """
    waiting = context.beside(_PATIENCE_SECONDS)
    outcome: Tokenized | FsdpShardError | None = None
    if context.is_main:
        try:
            outcome = tokenize_all(config, open_tokenizer(), cache_dir, (task or Task()).name)
        except FsdpShardError as error:
            outcome = error
    outcome = waiting.broadcast_object(outcome)
    if isinstance(outcome, FsdpShardError):
        raise outcome
    assert outcome is not None
    if config.streaming:
        return context.together(lambda: open_samples(config, outcome, task, seed, open_tokenizer))
    return open_samples(config, outcome, task, seed)


def _tokenize(
    config: DataConfig, held_out: bool, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None, task: str
) -> File:
    """Running text is one stream of tokens; all else is examples."""
    source, cache = open_source(config, held_out), cache_dir or cache_directory(config)
    if is_stream(config, task):
        # Windows of a masked LM each have a beginning of their own.
        return tokenize(source, tokenizer, cache, source.name, config.workers, begins=task != MASKED_LM)
    return encode_source(source, kind_of(config, task), tokenizer, cache, source.name, config.workers)


def _num_train(config: DataConfig, num_windows: int) -> int:
    if num_windows < 2:
        raise DataError(
            f"data.eval_fraction={config.eval_fraction} cannot hold out a part of {config.where}.path={config.path}: "
            f"the text is a single window of data.sequence_length={config.sequence_length} tokens. Give more text, "
            f"shorter windows, or data.eval_path."
        )
    return num_windows - min(num_windows - 1, max(1, round(num_windows * config.eval_fraction)))
