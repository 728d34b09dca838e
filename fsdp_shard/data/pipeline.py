"""Turns the settings of `data.*` into training samples and held-out samples.

One process tokenizes (`tokenize_all`), and every process maps the result (`open_samples`). `prepare_on_ranks` does both
over the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING

from fsdp_shard.data.config import (
    DataConfig,
    cache_directory,
    held_out_sets_of,
    is_running_text,
    kind_of,
    mixture_of,
    sources_of,
)
from fsdp_shard.data.kinds.chat import CHAT
from fsdp_shard.data.kinds.chat_spans import ends_turns
from fsdp_shard.data.kinds.chat_template import with_chat_template, writes_date
from fsdp_shard.data.kinds.kind import ROWS, Tokenizer
from fsdp_shard.data.kinds.preference import PREFERENCE, conversations_of
from fsdp_shard.data.kinds.running_text import encoded_kind
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.mixture import Concatenation, Mixture, seed_of
from fsdp_shard.data.samples.mixture_schedule import counts_per_round
from fsdp_shard.data.samples.protocol import Dataset, MapDataset, ShuffledDataset, SourceDataset
from fsdp_shard.data.sources.source import file_notes, open_source
from fsdp_shard.data.streaming.stream import StreamDataset, open_stream
from fsdp_shard.data.task import SpecialTokens, Task, check_class_order
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS, run_on_all, run_on_main
from fsdp_shard.errors import DataError
from fsdp_shard.models import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION, tokenizer_files

if TYPE_CHECKING:
    from fsdp_shard.distributed import Communicator, DistributedContext


_NUM_LOOKED_AT = 64  # examples, for a token that ends a turn or a target


@dataclass(frozen=True)
class TokenizedData:
    """The tokenized files of a data config.

    Attributes:
        train: The file of each source of the training data by name; empty for streamed data.
        held_out: The file of `data.eval_path`, under an empty name, or of each set of `data.eval_sets` by name.
        special: The special tokens of a masked language model.
        notes: Notes on the given files, to print.
        class_names: For a classifier, the setting and value of each source, with the class names in its data.
    """

    train: Mapping[str, TokenFile]
    held_out: Mapping[str, TokenFile]
    special: SpecialTokens | None = None
    notes: tuple[str, ...] = ()
    class_names: tuple[tuple[str, Sequence[str]], ...] = ()


@dataclass(frozen=True)
class Samples:
    """The training data, the held-out data (None: nothing is held out), and notes on how the rows were used.

    Notes that begin with `warning: ` report data that make a run worse.
    """

    train: Dataset
    held_out: MapDataset | None
    notes: tuple[str, ...]

    @property
    def sources(self) -> list[SourceDataset]:
        """The datasets that contain the samples, those of the training data first."""
        return [*self.train.sources, *(self.held_out.sources if self.held_out is not None else [])]

    def with_sources(self, sources: Sequence[SourceDataset], notes: Sequence[str]) -> Samples:
        """Return a copy with other datasets in place of `sources`, and with `notes` after its own."""
        num_train = len(self.train.sources)
        train = self.train.with_sources(sources[:num_train])
        held_out = None if self.held_out is None else self.held_out.with_sources(sources[num_train:])
        return Samples(train, held_out, (*self.notes, *notes))


def tokenize_all(config: DataConfig, tokenizer: Tokenizer, task: str = CAUSAL) -> TokenizedData:
    """Tokenize all sources that are not cached yet, in one process.

    Args:
        config: The settings of the data.
        tokenizer: The tokenizer.
        task: The value of `model.task`.

    Raises:
        DataError: The data cannot be read, or the cache cannot be written.
    """
    special = SpecialTokens.of(tokenizer) if task == MASKED_LM else None
    sources = {} if config.streaming else sources_of(config)
    train = {name: _tokenize(source, False, tokenizer, task) for name, source in sources.items()}
    sets = held_out_sets_of(config)
    held_out = {name: _tokenize(each, False, tokenizer, task) for name, each in sets.items()}
    if config.eval_path is not None:
        held_out[""] = _tokenize(config, True, tokenizer, task)
    given = [source.path for source in (*sources_of(config).values(), *sets.values())]
    given += [config.eval_path] if config.eval_path else []
    notes = list(chain.from_iterable(map(file_notes, given)))
    for name, source in sources.items():
        if source.kind == CHAT or task == SEQ2SEQ:
            examples = train[name].examples()
            first = map(examples.tokens_of, range(min(_NUM_LOOKED_AT, len(examples))))
            notes.append(_stop_warning(source, task, first, tokenizer))
    notes += [_date_warning(source, task, tokenizer) for source in sources_of(config).values()]
    names = _class_names(config) if task == SEQUENCE_CLASSIFICATION else ()
    return TokenizedData(train, held_out, special, tuple(filter(None, notes)), names)


def _class_names(config: DataConfig) -> tuple[tuple[str, Sequence[str]], ...]:
    sources = (*sources_of(config).values(), *held_out_sets_of(config).values())
    opened = [(one.label_column, open_source(one, False)) for one in sources]
    if config.eval_path is not None:
        opened.append((config.label_column, open_source(config, True)))
    return tuple((source.name, source.class_names(column)) for column, source in opened)


def _stop_warning(
    source: DataConfig, task: str, examples: Iterable[tuple[Iterable[int], Iterable[int]]], tokenizer: Tokenizer
) -> str:
    """Return a warning if chats or targets lack a token from which a model learns to stop, else an empty string."""
    return (
        _target_warning(source, examples, tokenizer) if task == SEQ2SEQ else _end_warning(source, examples, tokenizer)
    )


def _end_warning(
    source: DataConfig, examples: Iterable[tuple[Iterable[int], Iterable[int]]], tokenizer: Tokenizer
) -> str:
    tokenizer = with_chat_template(tokenizer, source)
    if ends_turns(examples, tokenizer):
        return ""
    template, end = f"data.chat_template={source.chat_template}", tokenizer.eos_token or "<|im_end|>"
    if source.chat_template is None:
        template = f"the chat template of {tokenizer_files(tokenizer)}"
    return (
        f"warning: {source.section}.path={source.path}: {template} ends no trained turn of the assistant with an end "
        f"token, such as {end}, so that the model does not learn to stop. Set data.chat_template to one that writes "
        f"it after each turn, inside {{% generation %}} if it uses that."
    )


def _target_warning(
    source: DataConfig, examples: Iterable[tuple[Iterable[int], Iterable[int]]], tokenizer: Tokenizer
) -> str:
    end = tokenizer.eos_token_id
    targets = ([token for token, is_target in zip(*one, strict=True) if is_target] for one in examples)
    if end is None or any(end in target for target in targets):
        return ""
    return (
        f"warning: {source.section}.path={source.path}: no target has {tokenizer.eos_token}, from which the model "
        f"learns to stop: neither the data nor the tokenizer adds it. Use a tokenizer whose post-processor does."
    )


def _date_warning(source: DataConfig, task: str, tokenizer: Tokenizer) -> str:
    """Return a warning if the chat template writes today's date, which changes the trained tokens from day to day."""
    if source.kind not in (CHAT, PREFERENCE) or not writes_date(with_chat_template(tokenizer, source)):
        return ""
    if source.kind == PREFERENCE and not _has_conversations(source, task):  # text without a template
        return ""
    return (
        f"warning: {source.section}.path={source.path}: the chat template writes today's date into each conversation, "
        f"so that a run on another day, or one that is resumed, trains on other tokens. Give the date with "
        f"data.chat_template_kwargs, such as {{date_string: 26 Jul 2024}}, if the template takes it from a variable."
    )


def _has_conversations(source: DataConfig, task: str) -> bool:
    kind = kind_of(source, task)
    first = list(islice(open_source(source, False).rows(kind.columns), _NUM_LOOKED_AT))
    return bool(conversations_of([kind.read(row) for row in first]))


def open_samples(
    config: DataConfig,
    tokenized: TokenizedData,
    task: Task | None = None,
    seed: int = 0,
    open_tokenizer: Callable[[], Tokenizer] | None = None,
    ranks: Communicator | None = None,
) -> Samples:
    """Map the tokenized files and make samples from them, in every process.

    Args:
        config: The settings of the data.
        tokenized: The files, as `tokenize_all` returned them.
        task: The task of the model; default is a causal language model.
        seed: Seed of masked tokens, and of the order of streamed data.
        open_tokenizer: Returns the tokenizer; only streamed data needs it, and uses it in a thread.
        ranks: The ranks that train, with a group on the CPU, for streamed data; None means this process alone.

    Raises:
        DataError: A file cannot be read, or contains nothing to train on.
    """
    task, special = task or Task(), tokenized.special
    for where, names in tokenized.class_names if task.samples == ROWS else ():
        check_class_order(names, task, where)
    samples_per_round, held_out, parts = _samples_per_round(config), dict[str, MapDataset](), dict[str, Dataset]()
    if config.streaming:
        assert open_tokenizer is not None
        streams, notes = _open_streams(config, open_tokenizer(), special, task, seed, ranks)
        parts.update(streams)
    else:
        files, divided, notes = _open_files(config, tokenized, task, seed)
        held_out.update(divided)
        for name, file in files.items():
            parts[name] = ShuffledDataset(file, seed_of(seed, name) if samples_per_round else seed)
    for name, own in {"": config, **held_out_sets_of(config)}.items():
        if name in tokenized.held_out:
            held_out[name], note = SampleFactory(own, task, special, seed).open(tokenized.held_out[name])
            notes.append(f"held out{f', {name}' if name else ''}: {note}")
    notes += _trained_held_out(config, tokenized)
    all_held_out = Concatenation(held_out) if held_out.keys() - {""} else held_out.get("")
    if not samples_per_round:  # no mixture
        return Samples(parts[""], all_held_out, (*tokenized.notes, *notes))
    mixture = Mixture(parts, samples_per_round)
    if until := mixture.samples_until_repeat():
        listed = ", ".join(f"{name} {count:,}" for name, count in until.items())
        notes.append(f"samples of the mixture until a source repeats: {listed}")
    return Samples(mixture, all_held_out, (*tokenized.notes, *notes))


@dataclass(frozen=True)
class RowLosses:
    """How much of a source is not trained.

    Attributes:
        where: Setting and value of the source.
        what: The unit of the counts: rows, or pairs or answers that are compared.
        num_trained: Those that are trained, at least in part.
        num_truncated: Those of `num_trained` whose end is cut off.
        num_dropped: Those with nothing to learn, or nothing within the tokens of a window.
        num_beyond: Those of `num_dropped` that a larger window would keep.
        skipped: For compared answers, how many were dropped and why, such as `2 pairs with equal answers`.
    """

    where: str
    what: str
    num_trained: int
    num_truncated: int
    num_dropped: int
    num_beyond: int
    skipped: tuple[str, ...]


def row_losses(config: DataConfig, tokenized: TokenizedData, task: Task) -> list[RowLosses]:
    """Count what `open_samples` would drop from each training source, except running text and streams.

    Args:
        config: The settings of the data.
        tokenized: The files, as `tokenize_all` returned them.
        task: The task of the model.
    """
    found = []
    for name, source in sources_of(config).items():
        if (file := tokenized.train.get(name)) is None or is_running_text(source, task.name):
            continue
        cut = SampleFactory(source, task, tokenized.special, 0).cut(file.examples(), file.classes)
        counts = (len(cut.kept), cut.num_truncated, file.num_dropped + cut.num_dropped, cut.num_beyond)
        found.append(RowLosses(f"{source.section}.path={source.path}", cut.what, *counts, tuple(map(str, cut.skipped))))
    return found


def _open_files(
    config: DataConfig, tokenized: TokenizedData, task: Task, seed: int
) -> tuple[dict[str, SourceDataset], dict[str, SourceDataset], list[str]]:
    """Return the trained part of each source, its held-out part, and notes."""
    train: dict[str, SourceDataset] = {}
    held_out: dict[str, SourceDataset] = {}
    notes, samples_per_round = [], _samples_per_round(config)
    for name, source in sources_of(config).items():
        factory, title = SampleFactory(source, task, tokenized.special, seed), _title(name, samples_per_round)
        if config.eval_fraction > 0 and source.packing:
            train[name], held_out[name], (note, other) = factory.open_divided(tokenized.train[name])
            notes += [f"{title}: {note}", f"held out: {other}"]
            notes += _more_than_asked(source, len(train[name]), len(held_out[name]))
            continue
        train[name], note = factory.open(tokenized.train[name])
        notes.append(f"{title}: {note}")
        if config.eval_fraction > 0:
            train[name], held_out[name] = _divide(source, train[name])
            notes.append(
                f"held out: the last {len(held_out[name]):,} of these windows, so {len(train[name]):,} are trained"
            )
    return train, held_out, notes


def _open_streams(
    config: DataConfig,
    tokenizer: Tokenizer,
    special: SpecialTokens | None,
    task: Task,
    seed: int,
    ranks: Communicator | None,
) -> tuple[dict[str, StreamDataset], list[str]]:
    samples_per_round, lock = _samples_per_round(config), Lock()
    streams = {}
    for name, source in sources_of(config).items():
        factory = SampleFactory(source, task, special, seed_of(seed, name) if samples_per_round else seed)
        streams[name] = open_stream(factory, with_chat_template(tokenizer, source), lock, ranks)
    notes = [f"{_title(name, samples_per_round)}: {stream.summary}" for name, stream in streams.items()]
    for name, source in sources_of(config).items():
        if source.kind == CHAT or task.name == SEQ2SEQ:
            first = streams[name].first_examples(_NUM_LOOKED_AT)
            notes.append(_stop_warning(source, task.name, first, tokenizer))
    return streams, [*filter(None, notes)]


def _trained_held_out(config: DataConfig, tokenized: TokenizedData) -> list[str]:
    """Warn about held-out data that are also training data, whose loss does not reflect other text."""
    sources = sources_of(config)
    trained = {file.digest: sources[name] for name, file in tokenized.train.items()}
    return [
        f"warning: {f'data.eval_sets.{name}' if name else f'data.eval_path={config.eval_path}'} has the tokens of the "
        f"training data itself ({trained[file.digest].section}.path={trained[file.digest].path}), so that the held-out "
        f"loss is one of training; give other data, or data.eval_fraction."
        for name, file in tokenized.held_out.items()
        if file.digest in trained
    ]


def _samples_per_round(config: DataConfig) -> dict[str, int]:
    """Return the number of samples of each source in a round of the mixture; empty without a mixture."""
    return counts_per_round({name: source.weight for name, source in mixture_of(config).items()})


def _title(name: str, samples_per_round: Mapping[str, int]) -> str:
    if not samples_per_round:
        return "train"
    return f"train, {name} ({samples_per_round[name]} of {sum(samples_per_round.values())} samples)"


def _more_than_asked(config: DataConfig, num_train: int, num_held_out: int) -> list[str]:
    """Return a warning if far more packed samples are held out than asked, as they are divided between texts only."""
    fraction = num_held_out / (num_train + num_held_out)
    if num_held_out < 2 or fraction <= 2 * config.eval_fraction:
        return []
    return [
        f"warning: {config.section}.path={config.path}: {fraction:.0%} are held out, {num_held_out:,} windows of "
        f"{num_train + num_held_out:,}, where data.eval_fraction={config.eval_fraction} asks for less: "
        f"data.packing=true divides between rows only, and the last ones are long. Give more rows, or data.eval_path."
    ]


def _divide(config: DataConfig, windows: SourceDataset) -> tuple[SourceDataset, SourceDataset]:
    """Divide windows into training windows and held-out windows."""
    num_windows = len(windows)
    if num_windows < 2:
        why = "a single row is left to train on. Give more rows"
        if config.kind == "text":
            size = f"data.sequence_length={config.sequence_length}"
            why = f"the text is a single window of {size} tokens. Give more text, shorter windows"
        raise DataError(
            f"data.eval_fraction={config.eval_fraction} cannot hold out a part of {config.section}.path={config.path}: "
            f"{why}, or data.eval_path."
        )
    num_train = num_windows - min(num_windows - 1, max(1, round(num_windows * config.eval_fraction)))
    return windows.slice(0, num_train), windows.slice(num_train, num_windows)


def prepare_held_out(config: DataConfig, tokenizer: Tokenizer) -> tuple[SourceDataset, str]:
    """Return what training would hold out, or all of data.path if it would hold out nothing, in one process.

    The text describes how the rows were used, such as how many were truncated. Evaluations reject mixtures and streams.
    """
    factory = SampleFactory(config, Task(), None, 0)
    file = _tokenize(config, config.eval_path is not None, tokenizer, CAUSAL)
    if config.eval_fraction and config.packing:
        _, held_out, (_, note) = factory.open_divided(file)
        return held_out, note
    samples, note = factory.open(file)
    if not config.eval_fraction:
        return samples, note
    _, held_out = _divide(config, samples)
    return held_out, f"{note}; the last {len(held_out):,} of these windows"


def prepare_on_ranks(
    config: DataConfig,
    open_tokenizer: Callable[[], Tokenizer],
    context: DistributedContext,
    task: Task | None = None,
    seed: int = 0,
) -> Samples:
    """Tokenize on rank 0 and open the samples on every rank; a collective.

    Args:
        config: The settings of the data.
        open_tokenizer: Returns the tokenizer; called on rank 0, and on every rank for streamed data.
        context: The ranks. They wait for rank 0 in a separate group, as large texts take hours.
        task: The task of the model; default is a causal language model.
        seed: Seed of masked tokens, and of the order of streamed data.

    Raises:
        FsdpShardError: On all ranks, if rank 0 fails, or ranks would stream different files.
    """
    waiting = context.with_new_group(LONGEST_TIMEOUT_SECONDS)
    name = (task or Task()).name
    tokenized = run_on_main(waiting, lambda: tokenize_all(config, open_tokenizer(), task=name))
    if not config.streaming:
        return open_samples(config, tokenized, task, seed)
    samples = run_on_all(context, lambda: open_samples(config, tokenized, task, seed, open_tokenizer, context))
    if len(set(context.all_gather_object(samples.train.identity))) > 1:
        raise DataError(
            "The files of the streamed data differ between the machines of this run. Give all of them the same ones."
        )
    return samples


def _tokenize(config: DataConfig, held_out: bool, tokenizer: Tokenizer, task: str) -> TokenFile:
    """Tokenize running text to one stream of tokens, and everything else to examples."""
    source, tokenizer = open_source(config, held_out), with_chat_template(tokenizer, config)
    kind = encoded_kind(config, task, tokenizer)
    return tokenize(source, kind, tokenizer, cache_directory(config), config.workers)
