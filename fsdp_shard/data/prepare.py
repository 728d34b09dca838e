"""From the settings of `data.*` to the samples that are trained and those that are held out.

One process tokenises (`tokenise_all`), every process maps the result (`open_samples`); `prepare` does both in one
process, `prepare_on_ranks` over the ranks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.data.base import DataConfig, cache_directory, is_stream, mixture_of, sources_of
from fsdp_shard.data.dataset import HeldOut
from fsdp_shard.data.examples import ExampleFile, encode_source
from fsdp_shard.data.framed import LabelledRows, Seq2SeqRows, cut_pairs, cut_texts
from fsdp_shard.data.kinds.registry import kind_of
from fsdp_shard.data.masked import MaskedWindows
from fsdp_shard.data.mixture import Mixture
from fsdp_shard.data.packing import PackedDataset
from fsdp_shard.data.rows import CausalRows, Cut, cut_causal
from fsdp_shard.data.shares import whole_shares
from fsdp_shard.data.sources import open_source
from fsdp_shard.data.task import CAUSAL, CLASSIFICATION, MASKED_LM, SEQ2SEQ, SpecialTokens, Task
from fsdp_shard.data.tokens import TokenFile, tokenise
from fsdp_shard.data.windows import WindowDataset
from fsdp_shard.errors import DataError, FsdpShardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.distributed import DistributedContext


File = TokenFile | ExampleFile


@dataclass(frozen=True)
class Tokenised:
    """The files of a config: one of each source by its name; `held_out` is None when nothing, or a part of `train`, is
    held out.
    """

    train: Mapping[str, File]
    held_out: File | None
    special: SpecialTokens | None = None


@dataclass(frozen=True)
class Samples:
    """What is trained and what is held out (None: nothing), and what became of the rows, for people to read."""

    train: HeldOut
    held_out: HeldOut | None
    notes: tuple[str, ...]


def tokenise_all(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None, task: str = CAUSAL
) -> Tokenised:
    """Tokenise what the cache does not have; for one process. Raises DataError."""
    special = SpecialTokens.of(tokenizer) if task == MASKED_LM else None
    sources = sources_of(config)
    train = {name: _tokenise(source, False, tokenizer, cache_dir, task) for name, source in sources.items()}
    held_out = _tokenise(config, True, tokenizer, cache_dir, task) if config.eval_path is not None else None
    return Tokenised(train, held_out, special)


def open_samples(config: DataConfig, tokenised: Tokenised, task: Task | None = None, seed: int = 0) -> Samples:
    """Map the files and cut them into samples; for every process. `seed` hides tokens. Raises DataError."""
    sources = sources_of(config)
    shares = whole_shares({name: source.weight for name, source in mixture_of(config).items()})
    train: dict[str, HeldOut] = {}
    held_out: dict[str, HeldOut] = {}
    notes = []
    for name, source in sources.items():
        train[name], note = _Shape(source, task or Task(), tokenised.special, seed).open(tokenised.train[name])
        notes.append(f"{_title(name, shares)}: {note}")
        if config.eval_fraction > 0:
            train[name], held_out[name] = _divide(source, train[name])
            kept, out = len(train[name]), len(held_out[name])
            notes.append(f"held out: the last {out} of these windows, so {kept} are trained")
    if tokenised.held_out is not None:
        held_out[""], note = _Shape(config, task or Task(), tokenised.special, seed).open(tokenised.held_out)
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


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> Samples:
    """Tokenise what the cache does not have and open it, in one process. Raises DataError."""
    return open_samples(config, tokenise_all(config, tokenizer, cache_dir))


def prepare_held_out(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> HeldOut:
    """What training would hold out, in one process; all of data.path when it would hold out nothing."""
    if config.eval_path is not None:  # without looking at data.path
        return _Shape(config, Task(), None, 0).open(_tokenise(config, True, tokenizer, cache_dir, CAUSAL))[0]
    samples = prepare(config, tokenizer, cache_dir)
    return samples.held_out or samples.train


def prepare_on_ranks(
    config: DataConfig,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context: DistributedContext,
    cache_dir: Path | None = None,
    task: Task | None = None,
    seed: int = 0,
) -> Samples:
    """Tokenise on rank 0 and open on every rank; the others need no tokenizer. An error of rank 0 is raised by all."""
    outcome: Tokenised | FsdpShardError | None = None
    if context.is_main:
        try:
            outcome = tokenise_all(config, open_tokenizer(), cache_dir, (task or Task()).name)
        except FsdpShardError as error:
            outcome = error
    outcome = context.broadcast_object(outcome)
    if isinstance(outcome, FsdpShardError):
        raise outcome
    assert outcome is not None
    return open_samples(config, outcome, task, seed)


def _tokenise(
    config: DataConfig, held_out: bool, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None, task: str
) -> File:
    """Running text is one stream of tokens; all else is examples."""
    source, cache = open_source(config, held_out), cache_dir or cache_directory(config)
    if is_stream(config, task):
        return tokenise(source, tokenizer, cache, source.name, config.workers)
    return encode_source(source, kind_of(config, task), tokenizer, cache, source.name, config.workers)


@dataclass(frozen=True)
class _Shape:
    """How files become samples."""

    config: DataConfig
    task: Task
    special: SpecialTokens | None
    seed: int

    def open(self, file: File) -> tuple[HeldOut, str]:
        """The samples of one file, and what became of its rows."""
        return self._windows(file) if isinstance(file, TokenFile) else self._rows(file)

    def _windows(self, file: TokenFile) -> tuple[HeldOut, str]:
        length, tokens = self.config.sequence_length, file.open()
        empty = f" ({file.num_empty_documents} empty ones left out)" if file.num_empty_documents else ""
        note = f"{file.num_documents} documents{empty}, {file.num_tokens} tokens"
        if self.special is not None:
            if length <= len(self.special.begin) + len(self.special.end):
                raise DataError(f"data.sequence_length={length} leaves no room beside the tokenizer's special tokens.")
            masked = MaskedWindows(tokens, length, file.digest, self.special, self.config.mask_fraction, self.seed)
            return (
                masked,
                f"{note}, {len(masked)} windows of {length}, {self.config.mask_fraction:.0%} of them to predict",
            )
        windows = WindowDataset(tokens, length, file.digest)
        padded = f", the last padded by {windows.num_padded}" if windows.num_padded else ""
        return windows, f"{note}, {len(windows)} windows of {length}{padded}"

    def _rows(self, file: ExampleFile) -> tuple[HeldOut, str]:
        config, examples, length = self.config, file.open(), self.config.sequence_length
        targets = config.target_length or length
        if self.task.name == SEQ2SEQ:
            cut = cut_pairs(examples, length, targets)
        elif self.task.name == CLASSIFICATION:
            cut = cut_texts(examples, length)
        else:
            cut = cut_causal(examples, length)
        note = _row_note(config, file, cut)
        if not len(cut.kept):
            raise DataError(
                f"{config.where}.path={config.path}: of {note}, nothing is left to train on. Give a larger "
                f"data.sequence_length."
            )
        if self.task.name == SEQ2SEQ:
            pairs = Seq2SeqRows(examples, cut.kept, length, "", targets, self.task.decoder_start)
            return pairs, f"{note}, sources of up to {length} and targets of up to {targets}"
        if self.task.name == CLASSIFICATION:
            numbers = _class_numbers(file.classes, self.task)
            return LabelledRows(examples, cut.kept, length, "", numbers), f"{note}, {len(numbers)} classes"
        rows = CausalRows(examples, cut.kept, length)
        if not config.packing:
            return rows, f"{note}, each in a window of up to {length}"
        packed = PackedDataset.pack(rows)
        full = 1 - packed.num_padded / (len(packed) * length)
        return packed, f"{note}, packed into {len(packed)} windows of {length} ({full:.1%} full)"


def _class_numbers(classes: Sequence[str | int], task: Task) -> tuple[int, ...]:
    """The model's number of each class in the data; raises DataError for a class that it does not have."""
    numbers = [name if isinstance(name, int) else task.label_numbers.get(name, -1) for name in classes]
    for name, number in zip(classes, numbers, strict=True):
        if not 0 <= number < task.num_labels:
            known = ", ".join(task.label_numbers) or "none by name"
            raise DataError(
                f"The data has a class {name!r}, but the model has {task.num_labels} classes, 0 to "
                f"{task.num_labels - 1} ({known}). Set id2label and label2id in its config.json, or data.label_column."
            )
    return tuple(numbers)


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
            f"data.eval_fraction={config.eval_fraction} cannot hold out a part of {config.where}.path={config.path}: "
            f"the text is a single window of data.sequence_length={config.sequence_length} tokens. Give more text, "
            f"shorter windows, or data.eval_path."
        )
    return num_windows - min(num_windows - 1, max(1, round(num_windows * config.eval_fraction)))
