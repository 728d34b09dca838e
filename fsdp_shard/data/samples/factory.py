"""Makes samples from tokens and examples, by the settings of a source and the task, with notes to print."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp_shard.data.config import DataConfig, is_running_text
from fsdp_shard.data.kinds.kind import LABELED, ROWS
from fsdp_shard.data.samples.packed_labeled_answers import PackedLabeledAnswers
from fsdp_shard.data.samples.packed_pairs import PackedPairs, fitting_pairs
from fsdp_shard.data.samples.packing import PackedRows
from fsdp_shard.data.samples.preferences import cut_answers, fits, preference_samples
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.samples.rows import CausalRows, Cut, LabeledRows, RowDataset, Seq2SeqRows
from fsdp_shard.data.samples.windows import MaskedWindows, WindowDataset
from fsdp_shard.data.task import SpecialTokens, Task
from fsdp_shard.data.tokenized.token_file import Array, Examples, TokenFile
from fsdp_shard.errors import DataError
from fsdp_shard.models import SEQ2SEQ, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import format_count


@dataclass(frozen=True)
class SampleFactory:
    """Makes samples from tokenized files, or from the examples of some rows, by the settings of a source.

    Attributes:
        config: The settings of the source.
        task: The task that the model is trained for.
        special: The special tokens of a masked language model.
        seed: Seed for choosing masked tokens.
    """

    config: DataConfig
    task: Task
    special: SpecialTokens | None
    seed: int

    def open(self, file: TokenFile) -> tuple[SourceDataset, str]:
        """Return the samples of one file, and notes to print on how its rows were used."""
        if is_running_text(self.config, self.task.name):
            dataset, notes = self._open_tokens(file)
        else:
            cut, notes = self._cut_rows(file)
            dataset = self.samples(file.examples(), cut, file.classes)
        return dataset, ", ".join([*notes, dataset.summary])

    def open_divided(self, file: TokenFile) -> tuple[SourceDataset, SourceDataset, tuple[str, str]]:
        """Return packed samples to train, others from the last rows to hold out, and notes to print on both.

        Rows are divided before they are packed: windows are shuffled, which spreads parts of one row over many of them.
        A single text is itself divided.

        Raises:
            DataError: There is no second row with something to train on.
        """
        (cut, notes), examples = self._cut_rows(file), file.examples()
        rows = np.repeat(np.arange(file.num_rows), file.examples_per_row())[cut.kept.reshape(len(cut.kept), -1)[:, 0]]
        begins = np.flatnonzero(np.diff(rows)) + 1
        is_one_text = not len(begins) and self.config.kind == "text"
        if is_one_text:
            begins = np.arange(1, len(rows))
        if not len(begins):
            raise DataError(
                f"data.eval_fraction={self.config.eval_fraction} cannot hold out a part of {self.config.section}.path="
                f"{self.config.path}: it has a single {self._noun} to train on, which data.packing=true does not "
                f"divide. Give more {self._noun}s, or data.eval_path."
            )
        first = int(begins[np.abs(begins - round(len(rows) * (1 - self.config.eval_fraction))).argmin()])
        parts = []
        for span in (slice(0, first), slice(first, len(rows))):
            shared = None if cut.shared is None else cut.shared[span]
            part = self.samples(examples, replace(cut, kept=cut.kept[span], shared=shared), file.classes)
            assert isinstance(part, RowDataset)
            parts.append(replace(part, part=f"+rows{span.start}"))
        train, held_out = parts
        last = "end of the document" if is_one_text else f"last {format_count(len(set(rows[first:])), self._noun)}"
        return train, held_out, (", ".join([*notes, train.summary]), f"the {last}, {held_out.summary}")

    @property
    def _noun(self) -> str:
        return "document" if self.config.kind == "text" else "row"

    def _open_tokens(self, file: TokenFile) -> tuple[SourceDataset, list[str]]:
        self.num_window_tokens()  # raises DataError
        empty = f" ({file.num_dropped} empty left out)" if file.num_dropped else ""
        documents = format_count(file.num_rows - file.num_dropped, "document")
        notes = [f"{documents}{empty}", format_count(file.num_tokens, "token")]
        return self.windows(file.tokens(), file.digest, self.seed), notes

    def _cut_rows(self, file: TokenFile) -> tuple[Cut, list[str]]:
        """Return the examples of a file after truncation, and notes; raise DataError if none are left."""
        config, longest, what = self.config, self.config.window_length, self._noun
        cut = self.cut(file.examples(), file.classes)
        num_rows = file.num_rows - file.num_dropped
        num_shared = file.num_examples - num_rows if config.kind == "text" else 0  # the examples of a document overlap
        notes = [format_count(file.num_rows, what), format_count(file.num_tokens - num_shared, "token")]
        if file.num_dropped:
            notes.append(f"{format_count(file.num_dropped, what)} dropped with nothing to learn")
        notes += [f"{reason} left out" for reason in cut.skipped]
        notes += cut.notes
        if cut.num_dropped and not cut.skipped:
            notes.append(f"{cut.num_dropped:,} dropped with nothing to learn in the first {longest} tokens")
        if cut.num_truncated:
            notes.append(f"{cut.num_truncated:,} cut to {longest} tokens")
        if not len(cut.kept):
            advice = "Increase data.sequence_length, or give other rows" if cut.num_beyond else "Give other rows"
            raise DataError(
                f"{config.section}.path={config.path}: of {', '.join(notes)}, nothing is left to train on. {advice}."
            )
        return cut, notes

    def cut(self, examples: Examples, classes: Sequence[str | int]) -> Cut:
        """Truncate examples to windows of `data.sequence_length`; keep those with something left to predict.

        Raises:
            DataError: The objective cannot compare the answers.
        """
        if self.task.samples != ROWS:
            packs = self.config.packing and self.task.samples != LABELED
            given = (examples, classes, self.task, self.config.window_length, self.config.section)
            found = cut_answers(*given, keeps_whole=packs)
            return fitting_pairs(found, examples, self.config.window_length, self._scored_padding) if packs else found
        first, lengths, longest = examples.first, examples.lengths, self.config.window_length
        num_beyond = 0
        if self.task.name == SEQ2SEQ:
            usable = (first > 0) & (first < lengths)
            longer = (first > longest) | (lengths - first > self._target_length)
        elif self.task.name == SEQUENCE_CLASSIFICATION:
            usable, longer = lengths > 0, lengths > longest
        else:
            usable, longer = fits(examples, self.task, longest)
            num_beyond = int(np.count_nonzero((first > longest) & (first < lengths)))
        kept = np.flatnonzero(usable)
        return Cut(kept, int(np.count_nonzero(longer[kept])), len(usable) - len(kept), num_beyond)

    @property
    def _scored_padding(self) -> int | None:
        """The padding token of a reward model; None for models that predict the tokens of answers."""
        return self.task.padding if self.task.name == SEQUENCE_CLASSIFICATION else None

    def samples(self, examples: Examples, cut: Cut, classes: Sequence[str | int]) -> SourceDataset:
        """Make samples from the examples that `cut` kept; `classes` are the names of their labels."""
        task, given = self.task, (examples, cut.kept, self.config.window_length)
        if task.samples != ROWS:
            found = preference_samples(*given, classes, task)
            if cut.shared is not None:
                return PackedPairs.pack(found, cut.shared, self._scored_padding)
            return PackedLabeledAnswers.pack(found) if self.config.packing else found
        if task.name == SEQ2SEQ:
            return Seq2SeqRows(*given, "", self._target_length, task.decoder_start, task.padding)
        if task.name == SEQUENCE_CLASSIFICATION:
            return LabeledRows(*given, "", _class_numbers(classes, task), task.padding)
        return PackedRows.pack(*given) if self.config.packing else CausalRows(*given)

    @property
    def _target_length(self) -> int:
        return self.config.target_length or self.config.window_length

    def windows(self, tokens: Array, name: str, seed: int) -> SourceDataset:
        """Make windows of `tokens` [num_tokens]; `seed` decides which tokens are masked."""
        length = self.config.window_length
        if self.special is None:
            return WindowDataset(tokens, length, name)
        special = self.special.within(self.task.vocabulary)
        return MaskedWindows(tokens, length, name, special, self.config.mask_fraction, seed)

    def num_window_tokens(self) -> int:
        """Return how many tokens of text fit into a window with its special tokens; raise DataError if none do."""
        length = self.config.window_length
        num_tokens = length - (len(self.special.begin) + len(self.special.end) if self.special is not None else 0)
        if num_tokens < 1:
            raise DataError(f"data.sequence_length={length} leaves no space besides the tokenizer's special tokens.")
        return num_tokens


def _class_numbers(classes: Sequence[str | int], task: Task) -> tuple[int, ...]:
    """Return the model's index of each class in the data; raise DataError for a class that the model lacks."""
    numbers = [_class_number(name, task) for name in classes]
    for name, number in zip(classes, numbers, strict=True):
        if not 0 <= number < task.num_labels:
            known = ", ".join(task.label_numbers) or "none by name"
            raise DataError(
                f"The data has a class {name!r}, but the model has {task.num_labels} classes, 0 to "
                f"{task.num_labels - 1} ({known}). Set id2label and label2id in its config.json, or data.label_column."
            )
    return tuple(numbers)


def _class_number(name: str | int, task: Task) -> int:
    """Return the index of a class, or -1 for an unknown name. A string is its name or, as in CSV files, its index.

    Raises:
        DataError: `name` is an integer, and also the name of a class with another index.
    """
    known, text = task.label_numbers, str(name).strip()
    if isinstance(name, str) and not text.isdecimal():
        return known.get(name, -1)
    if isinstance(name, str) and text in known:
        return known[text]
    number = int(text)
    if (named := known.get(str(number), number)) != number:
        raise DataError(
            f"The data has the class {number} as a number, which stands for index {number}, but the model's class "
            f"that is named '{number}' has index {named}. Write names as text, such as \"{number}\", or give the "
            f"classes of the model other names."
        )
    return number
