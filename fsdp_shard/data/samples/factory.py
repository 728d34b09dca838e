"""How tokens and examples become samples, by the settings of a source and the task, with notes for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_shard.data.config import DataConfig, is_running_text
from fsdp_shard.data.kinds.kind import CLASSIFICATION, SEQ2SEQ
from fsdp_shard.data.samples import rows
from fsdp_shard.data.samples.packing import PackedDataset
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.samples.windows import MaskedWindows, WindowDataset
from fsdp_shard.data.task import SpecialTokens, Task
from fsdp_shard.data.tokenized.token_file import Array, Examples, TokenFile
from fsdp_shard.errors import DataError
from fsdp_shard.utils import format_count


@dataclass(frozen=True)
class SampleFactory:
    """Makes samples of tokenized files, or of the examples of some rows, by the settings of a source.

    Attributes:
        config: The settings of the source.
        task: What the model is trained to do.
        special: The special tokens of a masked language model.
        seed: Seed of the choice of masked tokens.
    """

    config: DataConfig
    task: Task
    special: SpecialTokens | None
    seed: int

    def open(self, file: TokenFile) -> tuple[MapDataset, str]:
        """Return the samples of one file, and what became of its rows, for people."""
        opened = self._open_tokens if is_running_text(self.config, self.task.name) else self._open_examples
        dataset, note = opened(file)
        return dataset, f"{note}, {dataset.summary}"

    def _open_tokens(self, file: TokenFile) -> tuple[MapDataset, str]:
        assert self.window_tokens
        empty = f" ({file.num_dropped} empty left out)" if file.num_dropped else ""
        num_documents = file.num_rows - file.num_dropped
        note = f"{format_count(num_documents, 'document')}{empty}, {format_count(file.num_tokens, 'token')}"
        return self.windows(file.tokens(), file.digest, self.seed), note

    def _open_examples(self, file: TokenFile) -> tuple[MapDataset, str]:
        config, examples = self.config, file.examples()
        cut = self.cut(examples)
        note = _row_note(config, file, cut)
        if not len(cut.kept):
            raise DataError(
                f"{config.where}.path={config.path}: of {note}, nothing is left to train on. Increase "
                f"data.sequence_length."
            )
        return self.samples(examples, cut, file.classes), note

    def cut(self, examples: Examples) -> rows.Cut:
        """Truncate examples to windows of `data.sequence_length`."""
        config, length = self.config, self.config.sequence_length
        if self.task.name == SEQ2SEQ:
            return rows.cut_pairs(examples, length, config.target_length or length)
        if self.task.name == CLASSIFICATION:
            return rows.cut_texts(examples, length)
        return rows.cut_causal(examples, length)

    def samples(self, examples: Examples, cut: rows.Cut, classes: Sequence[str | int]) -> MapDataset:
        """Make samples of the examples that `cut` kept; `classes` has the names of their labels."""
        config, length, task = self.config, self.config.sequence_length, self.task
        if task.name == SEQ2SEQ:
            targets = config.target_length or length
            return rows.Seq2SeqRows(examples, cut.kept, length, "", targets, task.decoder_start, task.padding)
        if task.name == CLASSIFICATION:
            return rows.LabeledRows(examples, cut.kept, length, "", _class_numbers(classes, task), task.padding)
        unpacked = rows.CausalRows(examples, cut.kept, length)
        return PackedDataset.pack(unpacked) if config.packing else unpacked

    def windows(self, tokens: Array, name: str, seed: int) -> MapDataset:
        """Make windows of `tokens` [num_tokens]; `seed` decides which are masked."""
        length = self.config.sequence_length
        if self.special is None:
            return WindowDataset(tokens, length, name)
        return MaskedWindows(tokens, length, name, self.special, self.config.mask_fraction, seed)

    @property
    def window_tokens(self) -> int:
        """Tokens of text per window, without special tokens; raises DataError if there is no space for any."""
        length = self.config.sequence_length
        num_tokens = length - (len(self.special.begin) + len(self.special.end) if self.special is not None else 0)
        if num_tokens < 1:
            raise DataError(f"data.sequence_length={length} leaves no space besides the tokenizer's special tokens.")
        return num_tokens


def _class_numbers(classes: Sequence[str | int], task: Task) -> tuple[int, ...]:
    """Return the model's index of each class in the data; raise DataError for a class that it does not have."""
    numbers = [name if isinstance(name, int) else task.label_numbers.get(name, -1) for name in classes]
    for name, number in zip(classes, numbers, strict=True):
        if not 0 <= number < task.num_labels:
            known = ", ".join(task.label_numbers) or "none by name"
            raise DataError(
                f"The data has a class {name!r}, but the model has {task.num_labels} classes, 0 to "
                f"{task.num_labels - 1} ({known}). Set id2label and label2id in its config.json, or data.label_column."
            )
    return tuple(numbers)


def _row_note(config: DataConfig, file: TokenFile, cut: rows.Cut) -> str:
    what = "document" if config.kind == "text" else "row"
    note = f"{format_count(file.num_rows, what)}, {format_count(file.num_tokens, 'token')}"
    if file.num_dropped:
        note += f", {format_count(file.num_dropped, what)} dropped with nothing to learn"
    if cut.num_dropped:
        note += f", {cut.num_dropped} dropped with nothing to learn in the first {config.sequence_length} tokens"
    return note + (f", {cut.num_truncated} cut to {config.sequence_length} tokens" if cut.num_truncated else "")
