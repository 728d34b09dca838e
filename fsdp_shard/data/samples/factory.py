"""How tokens and examples become samples, by the settings of a source and the task; what became of rows, in words.

Knows no torch and no file but the two kinds that are tokenized into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.samples.masked_lm import MaskedWindows
from fsdp_shard.data.samples.packing import PackedDataset
from fsdp_shard.data.samples.padded import CausalRows, Cut, cut_causal
from fsdp_shard.data.samples.protocol import HeldOut
from fsdp_shard.data.samples.seq2seq_classification import LabeledRows, Seq2SeqRows, cut_pairs, cut_texts
from fsdp_shard.data.samples.windows import WindowDataset
from fsdp_shard.data.task import CLASSIFICATION, SEQ2SEQ, SpecialTokens, Task
from fsdp_shard.data.tokenized.example_cache import ExampleFile, Examples
from fsdp_shard.data.tokenized.token_cache import TokenFile
from fsdp_shard.errors import DataError


@dataclass(frozen=True)
class Shape:
    """How files, or the examples of some rows, become samples by the settings of a source."""

    config: DataConfig
    task: Task
    special: SpecialTokens | None
    seed: int

    def open(self, file: TokenFile | ExampleFile) -> tuple[HeldOut, str]:
        """The samples of one file, and what became of its rows."""
        return self._windows(file) if isinstance(file, TokenFile) else self._rows(file)

    def _windows(self, file: TokenFile) -> tuple[HeldOut, str]:
        length, tokens = self.config.sequence_length, file.open()
        empty = f" ({file.num_empty_documents} empty ones left out)" if file.num_empty_documents else ""
        note = f"{file.num_documents} documents{empty}, {file.num_tokens} tokens"
        assert self.room
        windows = self.windows(tokens, file.digest, self.seed)
        note = f"{note}, {len(windows)} windows of {length}"
        if self.special is not None:
            return windows, f"{note}, {self.config.mask_fraction:.0%} of them to predict"
        assert isinstance(windows, WindowDataset)
        padded = f", the last padded by {windows.num_padded}" if windows.num_padded else ""
        return windows, f"{note}{padded}"

    def _rows(self, file: ExampleFile) -> tuple[HeldOut, str]:
        config, examples, length = self.config, file.open(), self.config.sequence_length
        cut = self.cut(examples)
        note = _row_note(config, file, cut)
        if not len(cut.kept):
            raise DataError(
                f"{config.where}.path={config.path}: of {note}, nothing is left to train on. Give a larger "
                f"data.sequence_length."
            )
        samples = self.samples(examples, cut, file.classes)
        if isinstance(samples, Seq2SeqRows):
            return samples, f"{note}, sources of up to {length} and targets of up to {samples.target_length}"
        if isinstance(samples, LabeledRows):
            return samples, f"{note}, {len(samples.numbers)} classes"
        if not isinstance(samples, PackedDataset):
            return samples, f"{note}, each in a window of up to {length}"
        full = 1 - samples.num_padded / (len(samples) * length)
        return samples, f"{note}, packed into {len(samples)} windows of {length} ({full:.1%} full)"

    def cut(self, examples: Examples) -> Cut:
        """What is left of `examples` in windows of `data.sequence_length`."""
        config, length = self.config, self.config.sequence_length
        if self.task.name == SEQ2SEQ:
            return cut_pairs(examples, length, config.target_length or length)
        if self.task.name == CLASSIFICATION:
            return cut_texts(examples, length)
        return cut_causal(examples, length)

    def samples(self, examples: Examples, cut: Cut, classes: Sequence[str | int]) -> HeldOut:
        """The samples of `examples`, of which some are left; `classes` has the names of their labels."""
        config, length = self.config, self.config.sequence_length
        if self.task.name == SEQ2SEQ:
            targets = config.target_length or length
            return Seq2SeqRows(examples, cut.kept, length, "", targets, self.task.decoder_start, self.task.padding)
        if self.task.name == CLASSIFICATION:
            return LabeledRows(examples, cut.kept, length, "", _class_numbers(classes, self.task), self.task.padding)
        rows = CausalRows(examples, cut.kept, length)
        return PackedDataset.pack(rows) if config.packing else rows

    def windows(self, tokens: npt.NDArray[Any], name: str, seed: int) -> HeldOut:
        """Running text in windows; `seed` hides tokens."""
        length = self.config.sequence_length
        if self.special is None:
            return WindowDataset(tokens, length, name)
        return MaskedWindows(tokens, length, name, self.special, self.config.mask_fraction, seed)

    @property
    def room(self) -> int:
        """Tokens of running text that a window takes, beside special ones; raises DataError when there is none."""
        length = self.config.sequence_length
        room = length - (len(self.special.begin) + len(self.special.end) if self.special is not None else 0)
        if room < 1:
            raise DataError(f"data.sequence_length={length} leaves no room beside the tokenizer's special tokens.")
        return room


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
